//! `hdcs completions` and `hdcs man`: made from the command line itself, so they say what it takes.

use std::path::Path;

use clap::Args;
use clap_complete::Shell;

use super::Failure;

#[derive(Args, Debug)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(Args, Debug)]
pub struct Man {
    /// Where the pages go, one for each command; the directory is made
    #[arg(value_name = "DIR")]
    directory: std::path::PathBuf,
}

/// What a shell has to read to complete our commands.
pub fn completions(mut command: clap::Command, arguments: &Completions) {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command, "hdcs", &mut script);
    super::output::raw(&script);
}

/// Write a page for every command.
pub fn man(command: clap::Command, arguments: &Man) -> Result<(), Failure> {
    let at = |path: &Path, error: std::io::Error| {
        Failure::failed(format!("{}: {error}", path.display()))
    };
    let directory = &arguments.directory;
    std::fs::create_dir_all(directory).map_err(|error| at(directory, error))?;
    clap_mangen::generate_to(command, directory).map_err(|error| at(directory, error))?;
    super::output::line(&format!(
        "pages are in {}: read them with `man {}`, or put them into a directory of `manpath`",
        directory.display(),
        directory.join("hdcs.1").display()
    ));
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, ValueEnum};

    use super::*;

    #[test]
    fn every_shell_is_served_and_every_command_has_a_page() {
        for &shell in Shell::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut crate::Cli::command(), "hdcs", &mut script);
            assert!(
                String::from_utf8(script).unwrap().contains("discard-dirty"),
                "{shell}"
            );
        }
        let directory = tempfile::tempdir().unwrap();
        let arguments = Man {
            directory: directory.path().join("man"),
        };
        man(crate::Cli::command(), &arguments).unwrap();
        for page in ["hdcs.1", "hdcs-volume.1", "hdcs-volume-create.1"] {
            let text = std::fs::read_to_string(arguments.directory.join(page)).unwrap();
            assert!(text.contains(".SH"), "{page}");
        }
    }
}
