//! `embertune preview`: one row, its trained tokens coloured (between marks where colours can't be seen).

use std::io;

use tracing::Level;

use super::print;
use crate::config::{self, DataConfig};
use crate::data::{ChatTokenizer, Preview, preview as read_row};
use crate::report::{LineFormat, log};
use crate::{Error, Result, hub, terminal};

/// What is shown.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Options {
    /// Counted from 1.
    row: usize,
    ids: bool,
}

/// How trained text stands out.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Style {
    Colour,
    Marks,
}

pub(super) fn preview(args: &[String]) -> Result<()> {
    log::init(Level::INFO, LineFormat::Text, None);
    let (options, args) = Options::take(args)?;
    let config = config::load(&args)?.config;
    let DataConfig::Sft(data) = &config.data else {
        return Err(usage("`data.type = \"fake\"` has no rows to look at", "Name data in `data.name`."));
    };
    let dir = hub::config_dir(&config.model.name)?;
    let tokenizer = ChatTokenizer::load(&dir, &config.tokenizer)?;
    let shown = read_row(data, &tokenizer, options.row)?;
    let style = if terminal::has_colours(&io::stdout()) { Style::Colour } else { Style::Marks };
    let mut text = format!("{}\n\n", about(&shown, data.seq_len, style));
    text += &match options.ids {
        true => tokens(&tokenizer, &shown, style)?,
        false => document(&tokenizer, &shown, style)?,
    };
    print(&text)
}

impl Options {
    /// Takes `--row N` and `--ids` out of the arguments; the others are the configuration's.
    fn take(args: &[String]) -> Result<(Self, Vec<String>)> {
        let mut options = Options { row: 1, ids: false };
        let mut rest = Vec::new();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let (name, value) = arg.split_once('=').map_or((arg.as_str(), None), |(n, v)| (n, Some(v)));
            match name {
                "--row" => options.row = row_number(value.or_else(|| args.next().map(String::as_str)))?,
                "--ids" => options.ids = true,
                _ => rest.push(arg.clone()),
            }
        }
        Ok((options, rest))
    }
}

fn row_number(value: Option<&str>) -> Result<usize> {
    let number = value.and_then(|value| value.parse().ok()).filter(|&number| number > 0);
    number.ok_or_else(|| {
        let found = value.map_or("nothing".to_string(), |value| format!("`{value}`"));
        usage(&format!("`--row` wants a number from 1, not {found}"), "For example `--row 3`.")
    })
}

fn usage(message: &str, hint: &str) -> Error {
    Error::Usage { message: message.into(), hint: hint.into() }
}

/// A line about the row and one about what marks what.
fn about(shown: &Preview, seq_len: usize, style: Style) -> String {
    let Preview { row, sample, unprinted } = shown;
    let mut text = format!(
        "{} ({}): {} tokens, {} trained ({})",
        row.place,
        row.format.as_str(),
        sample.ids.len(),
        sample.trained(),
        style.paint("so", true)
    );
    if sample.ids.len() > seq_len {
        text += &format!("\nlonger than `data.seq_len` = {seq_len}: see `data.long_documents`");
    }
    if let Some(what) = unprinted {
        text +=
            &format!("\nit holds {} that the chat template doesn't print: {}", what.as_str(), what.hint());
    }
    text
}

fn document(tokenizer: &ChatTokenizer, shown: &Preview, style: Style) -> Result<String> {
    let parts = tokenizer.parts(&shown.sample)?;
    Ok(parts.iter().map(|(text, trained)| style.paint(&visible(text), *trained)).collect())
}

/// A token a line: its place, id and text.
fn tokens(tokenizer: &ChatTokenizer, shown: &Preview, style: Style) -> Result<String> {
    let sample = &shown.sample;
    let line = |(i, &id): (usize, &u32)| {
        let text = format!("{:?}", tokenizer.decode(&[id], false)?);
        Ok(format!("{i:>6} {id:>7} {}\n", style.paint(&text, sample.is_trained(i))))
    };
    sample.ids.iter().enumerate().map(line).collect()
}

impl Style {
    /// Text as it is, or so that one sees that it is trained: line by line, as pagers colour lines.
    fn paint(self, text: &str, trained: bool) -> String {
        match (self, trained) {
            (_, false) => text.into(),
            (Style::Marks, true) => format!("⟦{text}⟧"),
            (Style::Colour, true) => {
                let lines: Vec<String> = text.split('\n').map(|l| format!("\x1b[1;32m{l}\x1b[0m")).collect();
                lines.join("\n")
            }
        }
    }
}

/// Without characters that would steer the terminal.
fn visible(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => c.to_string(),
        c if c.is_control() => c.escape_default().to_string(),
        c => c.to_string(),
    };
    text.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_options_are_taken_and_the_others_left() {
        let take = |words: &[&str]| Options::take(&words.iter().map(|w| w.to_string()).collect::<Vec<_>>());
        let (options, rest) = take(&["@", "x.toml", "--row", "3", "--ids", "--data.name", "y"]).unwrap();
        assert_eq!(
            (options, rest.join(" ")),
            (Options { row: 3, ids: true }, "@ x.toml --data.name y".into())
        );
        assert_eq!(take(&["--row=7"]).unwrap().0.row, 7);
        for wrong in [&["--row"][..], &["--row", "0"], &["--row", "x"]] {
            assert!(take(wrong).unwrap_err().to_string().contains("`--row` wants a number from 1"));
        }
    }

    #[test]
    fn what_is_trained_stands_out_and_nothing_steers_the_terminal() {
        assert_eq!(Style::Marks.paint("a\nb", true), "⟦a\nb⟧");
        assert_eq!(Style::Colour.paint("a\nb", true), "\x1b[1;32ma\x1b[0m\n\x1b[1;32mb\x1b[0m");
        assert_eq!(Style::Colour.paint("a", false), "a");
        assert_eq!(visible("é\t\x1b[2J\n"), "é\t\\u{1b}[2J\n");
    }
}
