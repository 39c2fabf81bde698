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

    /// A command with all below it: what it does, how it is called, and what each of its arguments is.
    fn describe(command: &mut clap::Command, path: &str, text: &mut String) {
        let about = command.get_about().map(ToString::to_string);
        let is_group = command.has_subcommands();
        if !is_group {
            text.push_str(&format!("\n### {path}\n\n{}.\n", about.unwrap_or_default()));
            let usage = command.render_usage().to_string();
            let usage = usage.trim_start_matches("Usage: ").replace('\n', " ");
            let arguments: Vec<_> = usage
                .split_whitespace()
                .skip_while(|word| path.split(' ').any(|part| part == *word))
                .collect();
            text.push_str(&format!("\n`{path} {}`\n", arguments.join(" ")));
            let mut rows = String::new();
            for argument in command.get_arguments() {
                let is_common = matches!(argument.get_id().as_str(), "help" | "version" | "data");
                if argument.is_hide_set() || is_common {
                    continue;
                }
                rows.push_str(&row(argument));
            }
            if !rows.is_empty() {
                text.push_str("\n| argument | meaning |\n|---|---|\n");
                text.push_str(&rows);
            }
        }
        for sub in command.get_subcommands_mut() {
            if sub.get_name() != "help" && !sub.is_hide_set() {
                let path = format!("{path} {}", sub.get_name());
                describe(sub, &path, text);
            }
        }
    }

    fn row(argument: &clap::Arg) -> String {
        let help = argument
            .get_help()
            .map(ToString::to_string)
            .unwrap_or_default();
        let values = argument.get_possible_values();
        let values: Vec<_> = values
            .iter()
            .map(|value| format!("`{}`", value.get_name()))
            .collect();
        let takes_value = argument.get_action().takes_values();
        let of = if values.is_empty() || !takes_value {
            String::new()
        } else {
            format!(" ({})", values.join(", "))
        };
        let defaults: Vec<_> = (argument.get_default_values().iter())
            .map(|value| format!("`{}`", value.to_string_lossy()))
            .collect();
        let default = if defaults.is_empty() || !takes_value {
            String::new()
        } else {
            format!(". Default: {}", defaults.join(", "))
        };
        let help = help.replace('|', "\\|");
        format!("| `{}` | {help}{of}{default} |\n", name(argument))
    }

    fn name(argument: &clap::Arg) -> String {
        let values = argument.get_value_names().unwrap_or_default();
        let values: Vec<_> = values.iter().map(ToString::to_string).collect();
        let values = values.join(" ");
        match argument.get_long() {
            Some(long) if argument.get_action().takes_values() => format!("--{long} {values}"),
            Some(long) => format!("--{long}"),
            None => values,
        }
    }

    /// `HDCS_UPDATE=1 cargo test` writes the commands of docs/REFERENCE.md.
    #[test]
    fn commands_reference_has_not_drifted() {
        let mut command = crate::Cli::command().disable_help_subcommand(true);
        command.build();
        let mut text = String::new();
        describe(&mut command, "hdcs", &mut text);
        text.push('\n');
        hdcs_kit::documents::check_section("REFERENCE.md", "commands", &text);
    }

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
