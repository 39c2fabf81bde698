//! Certificates that do not prove what they should, and files that cannot be used.

use std::process::Command;

use hdcs_core::wire::Purpose;
use tempfile::TempDir;

use super::*;
use crate::conformance::{CLUSTER, End, ONE, Pair, TWO, config, known, memory};
use crate::error::{Refused, Side};

/// An authority, and certificates of both nodes of the suite.
struct Made {
    directory: TempDir,
}

impl Made {
    fn new() -> Self {
        let made = Self {
            directory: tempfile::tempdir().unwrap(),
        };
        made.tls_sh(&[]);
        made.node("one", &certificate_name(CLUSTER, ONE), &[]);
        made.node("two", &certificate_name(CLUSTER, TWO), &[]);
        made
    }

    /// Run the script that the tests of all crates use.
    fn tls_sh(&self, arguments: &[&str]) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testenv/tls.sh");
        let command = Command::new(script)
            .arg(self.directory.path())
            .args(arguments)
            .output();
        let command = command.unwrap();
        assert!(command.status.success(), "{command:?}");
    }

    fn node(&self, directory: &str, name: &str, more: &[&str]) {
        let name = format!("DNS:{name}");
        self.tls_sh(&[&["node", directory, &name], more].concat());
    }

    fn files(&self, node: &str) -> Files {
        let path = |name: &str| self.directory.path().join(node).join(name);
        Files {
            certificate: path("node-cert.pem"),
            key: path("node-key.pem"),
            authority: self.directory.path().join("ca-cert.pem"),
            revocations: None,
        }
    }

    fn load(&self, node: &str) -> Credentials {
        Credentials::load(&self.files(node)).unwrap()
    }
}

/// Why both ends of a connection end, of which the first expects to reach the second.
fn ends(one: &Credentials, two: &Credentials) -> [Why; 2] {
    let mut make = |first: Link, second: Link| {
        let (near, far) = memory();
        let first = End::new(first, one.connect(CLUSTER, TWO).unwrap(), near);
        (first, End::new(second, two.accept().unwrap(), far))
    };
    let configs = [config(ONE), config(TWO)];
    let mut pair = Pair::greeting(&mut make, Purpose::Bulk, configs, known(TWO), 1 << 20);
    pair.until("the end of both", |pair| {
        pair.two.connection.admit(Some(&known(ONE)));
        if pair.one.connection.is_open() && pair.two.connection.is_open() {
            pair.one.connection.shut_down();
        }
        pair.one.is_closed() && pair.two.is_closed()
    });
    [pair.one, pair.two].map(|end| end.connection.ended().unwrap().why.clone())
}

fn text(why: &Why) -> String {
    assert!(matches!(why, Why::Tls(_)), "{why}");
    why.to_string()
}

#[test]
fn certificates_prove_who_is_there() {
    let made = Made::new();
    let (one, two) = (made.load("one"), made.load("two"));
    assert_eq!(ends(&one, &two), [Why::Finished, Why::Bye]);
    // Whoever is reached is another node.
    let [why, other] = ends(&one, &one);
    assert!(text(&why).contains("of another node"), "{why}");
    assert!(
        text(&other).contains("refused this node's certificate"),
        "{other}"
    );
    // Whoever connects says that it is another node.
    let [why, other] = ends(&two, &two);
    let refused = |by| Why::Refused {
        by,
        refusal: Refused::Certificate(ONE),
    };
    assert_eq!((why, other), (refused(Side::Peer), refused(Side::This)));
}

#[test]
fn certificates_of_another_cluster_are_refused() {
    let (made, foreign) = (Made::new(), Made::new());
    let (one, two) = (made.load("one"), foreign.load("two"));
    let [why, other] = ends(&one, &two);
    assert!(text(&why).contains("has not signed"), "{why}");
    assert!(
        text(&other).contains("does not know the authority"),
        "{other}"
    );
}

#[test]
fn certificates_that_are_over_are_refused() {
    let made = Made::new();
    made.node("old", &certificate_name(CLUSTER, ONE), &["expired"]);
    let [why, other] = ends(&made.load("old"), &made.load("two"));
    assert!(text(&other).contains("has expired"), "{other}");
    assert!(
        text(&why).contains("refused this node's certificate"),
        "{why}"
    );
}

#[test]
fn certificates_that_are_revoked_are_refused() {
    let made = Made::new();
    made.tls_sh(&["revoke-node", "one"]);
    let two = Credentials::load(&Files {
        revocations: Some(made.directory.path().join("crl.pem")),
        ..made.files("two")
    });
    let [_, other] = ends(&made.load("one"), &two.unwrap());
    assert!(text(&other).contains("is revoked"), "{other}");
}

#[test]
fn peer_without_tls_is_told_from_one_with_it() {
    let made = Made::new();
    let two = made.load("two");
    let mut connect = |first: Link, second: Link| {
        let (near, far) = memory();
        let first = End::new(first, crate::transport::Plain, near);
        (first, End::new(second, two.accept().unwrap(), far))
    };
    let configs = [config(ONE), config(TWO)];
    let mut pair = Pair::greeting(&mut connect, Purpose::Bulk, configs, known(TWO), 1 << 20);
    pair.until("the end of both", |pair| {
        pair.one.is_closed() && pair.two.is_closed()
    });
    let why = &pair.two.connection.ended().unwrap().why;
    assert!(text(why).contains("TLS on or off"), "{why}");
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let made = Made::new();
    let load = |change: fn(&mut Files, PathBuf)| {
        let mut files = made.files("one");
        change(&mut files, made.directory.path().to_owned());
        Credentials::load(&files).unwrap_err().to_string()
    };
    let missing = load(|files, top| files.certificate = top.join("missing.pem"));
    assert!(missing.contains("missing.pem"), "{missing}");
    let empty = load(|files, _| files.certificate = files.key.clone());
    assert!(
        empty.contains("node-key.pem") && empty.contains("CERTIFICATE"),
        "{empty}"
    );
    let other = load(|files, top| files.key = top.join("two/node-key.pem"));
    assert!(other.contains("two/node-key.pem"), "{other}");
    let list = load(|files, _| files.revocations = Some(files.certificate.clone()));
    assert!(list.contains("X509 CRL"), "{list}");
    let key = load(|files, _| files.key = files.certificate.clone());
    assert!(key.contains("private key"), "{key}");
}
