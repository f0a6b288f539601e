//! What shells and `man` are given knows every command and every key.

mod common;

use std::process::Command;

use common::run::RunDir;

/// The commands that `--help` lists.
fn commands(dir: &RunDir) -> Vec<String> {
    let help = dir.run(&["--help"]).succeeds().stdout;
    let (_, list) = help.split_once("Commands:\n").expect("a list of commands");
    let names = list.lines().take_while(|line| !line.is_empty());
    let names = names.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(String::from)
        .collect()
}

/// The flags that `sft --help` lists.
fn flags(dir: &RunDir) -> Vec<String> {
    let help = dir.run(&["sft", "--help"]).succeeds().stdout;
    let flags =
        help.lines().filter_map(|line| line.strip_prefix("  --")?.split(' ').next().map(String::from));
    let flags: Vec<String> = flags.collect();
    assert!(flags.len() > 100 && flags.contains(&"optim.lr".to_string()), "{flags:?}");
    flags
}

#[test]
fn every_shell_is_told_of_every_command_and_key() {
    let dir = RunDir::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = dir.run(&["completions", shell]).succeeds().stdout;
        for word in commands(&dir).iter().chain(&flags(&dir)) {
            assert!(script.contains(word.as_str()), "{shell} isn't told of `{word}`");
        }
        dir.write(&format!("embertune.{shell}"), &script);
    }
    assert_eq!(dir.run(&["completions", "csh"]).code, Some(2));
    // Those that are here can read their own.
    for shell in ["bash", "zsh", "fish"] {
        let read = Command::new(shell).arg("-n").arg(dir.path(&format!("embertune.{shell}"))).output();
        match read {
            Ok(read) => assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr)),
            Err(_) => eprintln!("there is no {shell} here: its script is not read"),
        }
    }
}

/// What bash offers for the last of these words.
fn offered(dir: &RunDir, words: &[&str]) -> Vec<String> {
    let (current, before) = (words[words.len() - 1], words[words.len() - 2]);
    let script = format!(
        "source embertune.bash; COMP_WORDS=({}); COMP_CWORD={}; _embertune embertune '{current}' '{before}'; \
         printf '%s\\n' \"${{COMPREPLY[@]}}\"",
        words.iter().map(|word| format!("'{word}'")).collect::<Vec<_>>().join(" "),
        words.len() - 1
    );
    let out =
        Command::new("bash").args(["--norc", "-c", &script]).current_dir(dir.path("")).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap().lines().map(String::from).collect()
}

#[test]
fn bash_completes_commands_keys_and_values() {
    let dir = RunDir::new();
    dir.write("embertune.bash", &dir.run(&["completions", "bash"]).succeeds().stdout);
    assert_eq!(offered(&dir, &["embertune", "sw"]), ["sweep"]);
    assert_eq!(offered(&dir, &["embertune", "sft", "--optim.l"]), ["--optim.lr"]);
    assert_eq!(offered(&dir, &["embertune", "sft", "--optim.type", "s"]), ["sgd", "sign_sgd"]);
    assert_eq!(offered(&dir, &["embertune", "preview", "--r"]), ["--row"]);
    assert_eq!(offered(&dir, &["embertune", "generate", "--temp"]), ["--temperature"]);
}

#[test]
fn each_command_has_a_manual_page_and_sft_s_has_each_key() {
    let dir = RunDir::new();
    dir.run(&["man", "--out", "man1"]).succeeds();
    for command in commands(&dir) {
        let page = dir.text(&format!("man1/embertune-{command}.1"));
        assert_eq!(page.trim(), dir.run(&["man", &command]).succeeds().stdout.trim(), "{command}");
        assert!(page.contains(&format!(".TH embertune-{command} 1")), "{page}");
    }
    let plain = |text: String| text.replace('\\', "");
    assert!(plain(dir.text("man1/embertune.1")).contains("embertune-sweep(1)"));
    let page = plain(dir.text("man1/embertune-sft.1"));
    for flag in flags(&dir) {
        assert!(page.contains(&format!("fB--{flag}fR")), "`{flag}` isn't on sft's page");
    }
    assert!(page.contains("Only `sft`. Seed of the shuffling. Default: 0. Only `fake`."), "both meanings");
    // Our own pages are written again, another's never.
    dir.run(&["man", "--out", "man1"]).succeeds();
    dir.write("man1/embertune-merge.1", "mine");
    dir.run(&["man", "--out", "man1"]).fails(2).says(&["embertune-merge.1", "nothing is overwritten"]);
    assert_eq!(dir.text("man1/embertune-merge.1"), "mine");
    dir.run(&["man", "tune"]).fails(2).says(&["no command `tune`", "sweep"]);
}
