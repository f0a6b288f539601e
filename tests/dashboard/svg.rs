//! A terminal's screen as a picture. What makes up plots and boxes is drawn, for fonts disagree about it.

use std::collections::BTreeMap;
use std::fmt::Write;

const WIDTH: f64 = 8.4;
const HEIGHT: f64 = 18.0;
const MARGIN: f64 = 12.0;
const BACKGROUND: &str = "#14171c";
const FOREGROUND: &str = "#d4d7dd";

/// What draws the same way.
type Paths = BTreeMap<String, String>;

pub fn picture(screen: &vt100::Screen) -> String {
    let (rows, columns) = screen.size();
    let (width, height) =
        (2.0 * MARGIN + f64::from(columns.get()) * WIDTH, 2.0 * MARGIN + f64::from(rows.get()) * HEIGHT);
    let (mut texts, mut fills, mut lines) = (String::new(), Paths::new(), Paths::new());
    for row in 0..rows.get() {
        let mut run: Option<(u16, String, String)> = None;
        for column in 0..columns.get() {
            let Some(cell) = screen.cell(row, column) else { continue };
            let (x, y) = (MARGIN + f64::from(column) * WIDTH, MARGIN + f64::from(row) * HEIGHT);
            let (colour, behind) = colours(cell);
            if let Some(behind) = behind {
                rectangle(fills.entry(behind).or_default(), (x, y), (WIDTH, HEIGHT));
            }
            let c = cell.contents().chars().next().unwrap_or(' ');
            let drawn = c == ' '
                || draw(
                    c,
                    (x, y),
                    fills.entry(colour.clone()).or_default(),
                    lines.entry(colour.clone()).or_default(),
                );
            let style = style(cell, &colour);
            match &mut run {
                Some((_, text, of)) if !drawn && *of == style => text.push_str(cell.contents()),
                Some((_, text, _)) if c == ' ' => text.push(' '),
                _ => {
                    finish(&mut texts, run.take(), row);
                    run = (!drawn).then(|| (column, cell.contents().to_string(), style));
                }
            }
        }
        finish(&mut texts, run, row);
    }
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\" font-family=\"ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace\" \
         font-size=\"14\">\n<rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"{BACKGROUND}\"/>\n"
    );
    for (colour, path) in fills.iter().filter(|(_, path)| !path.is_empty()) {
        let _ = writeln!(svg, "<path fill=\"{colour}\" d=\"{path}\"/>");
    }
    for (colour, path) in lines.iter().filter(|(_, path)| !path.is_empty()) {
        let _ = writeln!(svg, "<path fill=\"none\" stroke=\"{colour}\" d=\"{path}\"/>");
    }
    svg + &texts + "</svg>\n"
}

/// A piece of a row in one style.
fn finish(texts: &mut String, run: Option<(u16, String, String)>, row: u16) {
    let Some((column, text, style)) = run else { return };
    let text = text.trim_end();
    let (x, y) = (MARGIN + f64::from(column) * WIDTH, MARGIN + f64::from(row) * HEIGHT + 13.5);
    let length = text.chars().count() as f64 * WIDTH;
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        texts,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" textLength=\"{length:.1}\" xml:space=\"preserve\"{style}>{text}</text>"
    );
}

/// Foreground, and background where it isn't the terminal's own.
fn colours(cell: &vt100::Cell) -> (String, Option<String>) {
    let (front, back) = (colour(cell.fgcolor()), colour(cell.bgcolor()));
    match cell.inverse() {
        false => (front.unwrap_or(FOREGROUND.into()), back),
        true => (back.unwrap_or(BACKGROUND.into()), Some(front.unwrap_or(FOREGROUND.into()))),
    }
}

fn style(cell: &vt100::Cell, colour: &str) -> String {
    let mut style = format!(" fill=\"{colour}\"");
    for (is, what) in [
        (cell.bold(), " font-weight=\"bold\""),
        (cell.italic(), " font-style=\"italic\""),
        (cell.underline(), " text-decoration=\"underline\""),
    ] {
        if is {
            style += what;
        }
    }
    style
}

fn colour(colour: vt100::Color) -> Option<String> {
    const NAMED: [&str; 16] = [
        "#2a2e36", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#c8ccd4", "#6b7280",
        "#ff7b86", "#b5e890", "#ffd787", "#7cc4ff", "#de9bf2", "#7fe0ec", "#ffffff",
    ];
    match colour {
        vt100::Color::Default => None,
        vt100::Color::Idx(n @ 0..16) => Some(NAMED[usize::from(n)].into()),
        vt100::Color::Idx(n @ 16..232) => {
            let level = |n: u8| if n == 0 { 0 } else { 55 + 40 * n };
            let n = n - 16;
            Some(format!("#{:02x}{:02x}{:02x}", level(n / 36), level(n / 6 % 6), level(n % 6)))
        }
        vt100::Color::Idx(n) => Some(format!("#{0:02x}{0:02x}{0:02x}", 8 + 10 * (n - 232))),
        vt100::Color::Rgb(r, g, b) => Some(format!("#{r:02x}{g:02x}{b:02x}")),
    }
}

fn rectangle(path: &mut String, (x, y): (f64, f64), (width, height): (f64, f64)) {
    let _ = write!(path, "M{x:.1} {y:.1}h{width:.1}v{height:.1}h-{width:.1}z");
}

/// Draws a character of plots, bars and boxes; says whether it was one.
fn draw(c: char, (x, y): (f64, f64), fills: &mut String, lines: &mut String) -> bool {
    let (right, down, middle) = (x + WIDTH, y + HEIGHT, (x + WIDTH / 2.0, y + HEIGHT / 2.0));
    let (mx, my) = middle;
    match c {
        '\u{2800}'..='\u{28ff}' => {
            let dots = u32::from(c) - 0x2800;
            // Bits by column and row.
            for (bit, at) in
                [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (3, 1)].iter().enumerate()
            {
                if dots >> bit & 1 == 1 {
                    let (row, column) = (f64::from(at.0), f64::from(at.1));
                    let corner = (x + (column + 0.25) * WIDTH / 2.0, y + (row + 0.2) * HEIGHT / 4.0);
                    rectangle(fills, corner, (2.4, 2.4));
                }
            }
        }
        '\u{2588}' => rectangle(fills, (x, y), (WIDTH, HEIGHT)),
        '\u{2589}'..='\u{258f}' => {
            let eighths = f64::from(0x2590 - u32::from(c));
            rectangle(fills, (x, y), (WIDTH * eighths / 8.0, HEIGHT));
        }
        '─' => drop(write!(lines, "M{x:.1} {my:.1}H{right:.1}")),
        '│' => drop(write!(lines, "M{mx:.1} {y:.1}V{down:.1}")),
        '┌' => drop(write!(lines, "M{mx:.1} {down:.1}V{my:.1}H{right:.1}")),
        '┐' => drop(write!(lines, "M{mx:.1} {down:.1}V{my:.1}H{x:.1}")),
        '└' => drop(write!(lines, "M{mx:.1} {y:.1}V{my:.1}H{right:.1}")),
        '┘' => drop(write!(lines, "M{mx:.1} {y:.1}V{my:.1}H{x:.1}")),
        _ => return false,
    }
    true
}
