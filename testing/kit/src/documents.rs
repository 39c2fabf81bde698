//! Documents of which a section is generated from code.

use std::path::Path;

/// Check that the section called `name` of a document below `docs/` is `expected`, or make it so if `HDCS_UPDATE` is set.
///
/// The section lies between the lines `<!-- NAME: begin -->` and `<!-- NAME: end -->`.
///
/// # Panics
/// If it differs, or there is none.
pub fn check_section(document: &str, name: &str, expected: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../docs")
        .join(document);
    let text = std::fs::read_to_string(&path).expect("the document is there");
    let (begin, end) = (
        format!("<!-- {name}: begin -->\n"),
        format!("<!-- {name}: end -->"),
    );
    let (before, rest) = text.split_once(&begin).expect("the section begins");
    let (found, after) = rest.split_once(&end).expect("the section ends");
    if std::env::var_os("HDCS_UPDATE").is_some() {
        let text = format!("{before}{begin}{expected}{end}{after}");
        std::fs::write(&path, text).expect("the document can be written");
        return;
    }
    assert!(
        found == expected,
        "the {name} in docs/{document} differ from the code: run `HDCS_UPDATE=1 cargo test --workspace --lib has_not_drifted`"
    );
}
