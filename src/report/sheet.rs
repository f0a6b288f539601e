//! What plots are drawn on: lines, marks and letters in one look, whatever becomes of them, an SVG or a PNG.
//!
//! Lengths are in pixels of the finished picture.

use std::fmt::Write as _;
use std::sync::Once;

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::register_font;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::{Error, Result};

/// A colour by day and by night.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ink {
    day: [u8; 3],
    night: [u8; 3],
}

const fn ink(day: u32, night: u32) -> Ink {
    let [_, r, g, b] = day.to_be_bytes();
    let [_, nr, ng, nb] = night.to_be_bytes();
    Ink { day: [r, g, b], night: [nr, ng, nb] }
}

pub(super) const PAPER: Ink = ink(0xFFFFFF, 0x12161C);
pub(super) const TEXT: Ink = ink(0x24292F, 0xE1E6EB);
pub(super) const MUTED: Ink = ink(0x5B636C, 0x9AA3AD);
pub(super) const GRID: Ink = ink(0xE3E7EB, 0x2A3038);

/// One a run: after Okabe and Ito, whose colours are told apart by all kinds of colour vision; some darker, to stand out
/// from white.
pub(super) const RUNS: [Ink; 8] = [
    ink(0x0072B2, 0x58AEE6),
    ink(0xD55E00, 0xF58A45),
    ink(0x008F68, 0x35C796),
    ink(0xB0508E, 0xE192C4),
    ink(0x4A4F55, 0xC3C9D0),
    ink(0xC08000, 0xF0B840),
    ink(0x1BA6C9, 0x7ADAF2),
    ink(0x7A3B1D, 0xC99272),
];

impl Ink {
    /// The same, faint.
    pub fn faint(self) -> Self {
        let mix = |a: [u8; 3], b: [u8; 3], part: f64| {
            std::array::from_fn(|n| (f64::from(a[n]) * part + f64::from(b[n]) * (1.0 - part)).round() as u8)
        };
        Ink { day: mix(self.day, PAPER.day, 0.32), night: mix(self.night, PAPER.night, 0.4) }
    }

    fn color(self) -> RGBColor {
        let [r, g, b] = self.day;
        RGBColor(r, g, b)
    }
}

/// Lengths of a line's dashes and of what is left out between them; whole by default.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Dashes(Option<(f64, f64)>);

impl Dashes {
    /// Those that tell runs of one colour apart.
    pub fn of_round(round: usize) -> Self {
        Self([None, Some((8.0, 4.0)), Some((2.0, 4.0))][round % 3])
    }

    /// The pieces of a line that are drawn.
    fn cut(self, points: &[(f64, f64)]) -> Vec<Vec<(f64, f64)>> {
        let Some((on, off)) = self.0 else { return vec![points.to_vec()] };
        let (mut pieces, mut piece) = (Vec::new(), points.first().copied().into_iter().collect::<Vec<_>>());
        let (mut draws, mut left) = (true, on);
        for pair in points.windows(2) {
            let (mut from, to) = (pair[0], pair[1]);
            loop {
                let length = (to.0 - from.0).hypot(to.1 - from.1);
                if length < left {
                    left -= length;
                    if draws {
                        piece.push(to);
                    }
                    break;
                }
                let part = left / length;
                from = (from.0 + part * (to.0 - from.0), from.1 + part * (to.1 - from.1));
                if draws {
                    piece.push(from);
                    pieces.push(std::mem::take(&mut piece));
                } else {
                    piece = vec![from];
                }
                draws = !draws;
                left = if draws { on } else { off };
            }
        }
        // A point alone is a dot.
        if piece.len() > 1 || points.len() == 1 {
            pieces.push(piece);
        }
        pieces
    }
}

/// The shape of a point; each run has its own beside its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    Disc,
    Square,
    Triangle,
    Diamond,
}

impl Mark {
    pub const ALL: [Mark; 4] = [Mark::Disc, Mark::Square, Mark::Triangle, Mark::Diamond];

    /// Its corners around (0, 0), for a size of 1; a disc has none.
    fn corners(self) -> &'static [(f64, f64)] {
        match self {
            Mark::Disc => &[],
            Mark::Square => &[(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
            Mark::Triangle => &[(0.0, -1.2), (1.15, 0.85), (-1.15, 0.85)],
            Mark::Diamond => &[(0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)],
        }
    }
}

/// Where a text is put beside its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beside {
    Right,
    Left,
    Middle,
}

type Drawn = std::result::Result<(), String>;

/// Something that can be drawn, in one size or another.
pub(super) trait Drawing {
    fn size(&self) -> (u32, u32);
    fn draw<D: DrawingBackend>(&self, sheet: &Sheet<'_, D>) -> Drawn;
}

pub(super) struct Sheet<'a, D: DrawingBackend> {
    area: &'a DrawingArea<D, Shift>,
    /// Pixels of the backend, which knows whole ones only, in one of ours.
    scale: f64,
    /// Whether the backend joins the pieces of a line well. That of pixels lets sharp corners grow into spikes, so it gets
    /// the pieces one by one.
    joins: bool,
    /// How much lower than the backend puts them letters have to be, as a part of their size.
    lower: f64,
}

impl<D: DrawingBackend> Sheet<'_, D> {
    fn at(&self, (x, y): (f64, f64)) -> (i32, i32) {
        ((x * self.scale).round() as i32, (y * self.scale).round() as i32)
    }

    /// A line from point to point; a point alone is a dot.
    pub fn line(&self, points: &[(f64, f64)], ink: Ink, width: f64) -> Drawn {
        let mut places: Vec<_> = points.iter().map(|&point| self.at(point)).collect();
        places.dedup();
        if let [(x, y)] = places[..] {
            return self.disc((f64::from(x) / self.scale, f64::from(y) / self.scale), ink, width.max(1.5));
        }
        let thickness = (width * self.scale).round().max(1.0) as u32;
        let style = ink.color().stroke_width(thickness);
        let draw = |places: &[(i32, i32)]| {
            self.area.draw(&PathElement::new(places.to_vec(), style)).map_err(|e| e.to_string())
        };
        if self.joins || places.len() == 2 {
            return draw(&places[..]);
        }
        places.windows(2).try_for_each(draw)?;
        if thickness > 2 {
            let corner = |place: &(i32, i32)| {
                let disc = Circle::new(*place, thickness as i32 / 2, ink.color().filled());
                self.area.draw(&disc).map_err(|e| e.to_string())
            };
            places.iter().try_for_each(corner)?;
        }
        Ok(())
    }

    /// A line with dashes.
    pub fn dashed(&self, points: &[(f64, f64)], ink: Ink, width: f64, dashes: Dashes) -> Drawn {
        dashes.cut(points).iter().try_for_each(|piece| self.line(piece, ink, width))
    }

    fn disc(&self, place: (f64, f64), ink: Ink, radius: f64) -> Drawn {
        let radius = (radius * self.scale).round() as i32;
        self.area.draw(&Circle::new(self.at(place), radius, ink.color().filled())).map_err(|e| e.to_string())
    }

    /// A point with a rim that parts it from the lines behind it.
    pub fn mark(&self, place: (f64, f64), mark: Mark, ink: Ink) -> Drawn {
        self.shape(place, mark, PAPER, 4.9)?;
        self.shape(place, mark, ink, 3.4)
    }

    fn shape(&self, (x, y): (f64, f64), mark: Mark, ink: Ink, size: f64) -> Drawn {
        if mark == Mark::Disc {
            return self.disc((x, y), ink, size);
        }
        let corners = mark.corners().iter().map(|(dx, dy)| self.at((x + dx * size, y + dy * size)));
        let polygon = Polygon::new(corners.collect::<Vec<_>>(), ink.color().filled());
        self.area.draw(&polygon).map_err(|e| e.to_string())
    }

    /// A text whose letters stand around the height `y`.
    pub fn text(&self, text: &str, (x, y): (f64, f64), size: f64, ink: Ink, beside: Beside) -> Drawn {
        let side = match beside {
            Beside::Right => HPos::Left,
            Beside::Left => HPos::Right,
            Beside::Middle => HPos::Center,
        };
        let style = TextStyle::from(("sans-serif", size * self.scale * LINE).into_font());
        let color = ink.color();
        let style = style.color(&color).pos(Pos::new(side, VPos::Center));
        let place = self.at((x, y + self.lower * size));
        self.area.draw(&Text::new(text.to_string(), place, style)).map_err(|e| e.to_string())
    }
}

/// Plotters' size of a font is the height of its lines, which it takes for this many times the size of the letters.
const LINE: f64 = 1.24;

/// How wide a text is.
pub(super) fn text_width(text: &str, size: f64) -> f64 {
    load_font();
    // In larger letters, for the fractions of a pixel.
    let (width, _) = ("sans-serif", 16.0 * size * LINE).into_font().box_size(text).unwrap_or_default();
    f64::from(width) / 16.0
}

/// The letters, for pictures and for measuring.
fn load_font() {
    static LOADED: Once = Once::new();
    LOADED.call_once(|| {
        let font = include_bytes!("../../assets/fonts/DejaVuSans.ttf");
        assert!(register_font("sans-serif", FontStyle::Normal, font).is_ok(), "assets/fonts holds a font");
    });
}

/// What an SVG's root is known by, to style sheets too.
pub(super) const CLASS: &str = "class=\"curves\"";

/// Draws an SVG that needs nothing else: colours for day and night, any sans-serif letters.
pub(super) fn svg(drawing: &impl Drawing, title: &str) -> Result<String> {
    const SCALE: u32 = 4;
    load_font();
    let (width, height) = drawing.size();
    let mut text = String::new();
    let area = SVGBackend::with_string(&mut text, (width * SCALE, height * SCALE)).into_drawing_area();
    let drawn = draw_on(&area, drawing, f64::from(SCALE), true);
    drop(area);
    drawn.map_err(|e| Error::train(format!("the curves can't be drawn: {e}"), ""))?;
    let fine = format!("width=\"{}\" height=\"{}\"", width * SCALE, height * SCALE);
    let mut label = String::new();
    escape(title, &mut label);
    let coarse = format!("width=\"{width}\" height=\"{height}\" {CLASS} role=\"img\" aria-label=\"{label}\"");
    let text = text.replacen(&fine, &coarse, 1);
    Ok(text.replacen(">\n", &format!(">\n<style>{}</style>\n", night()), 1))
}

/// Draws a PNG, twice as large in each direction as the picture is meant to be seen.
pub(super) fn write_png(drawing: &impl Drawing, path: &std::path::Path) -> Result<()> {
    const SCALE: u32 = 2;
    load_font();
    let (width, height) = drawing.size();
    let area = BitMapBackend::new(path, (width * SCALE, height * SCALE)).into_drawing_area();
    draw_on(&area, drawing, f64::from(SCALE), false)
        .map_err(|text| Error::io(path, "write", std::io::Error::other(text)))
}

fn draw_on<D: DrawingBackend>(
    area: &DrawingArea<D, Shift>,
    drawing: &impl Drawing,
    scale: f64,
    vector: bool,
) -> Drawn {
    area.fill(&PAPER.color()).map_err(|e| e.to_string())?;
    let lower = if vector { 0.1 } else { 0.2 };
    drawing.draw(&Sheet { area, scale, joins: vector, lower })?;
    area.present().map_err(|e| e.to_string())
}

/// Rules that give each colour of the day its colour of the night.
fn night() -> String {
    let mut rules =
        String::from(".curves polyline{stroke-linejoin:round}@media (prefers-color-scheme:dark){");
    let faint = RUNS.map(Ink::faint);
    for Ink { day, night } in [PAPER, TEXT, MUTED, GRID].iter().chain(&RUNS).chain(&faint) {
        let hex = |[r, g, b]: &[u8; 3]| format!("#{r:02X}{g:02X}{b:02X}");
        let (day, night) = (hex(day), hex(night));
        let _ = write!(
            rules,
            ".curves [fill=\"{day}\"]{{fill:{night}}}.curves [stroke=\"{day}\"]{{stroke:{night}}}"
        );
    }
    rules + "}"
}

/// Adds a text to HTML or XML, in an element or an attribute.
pub(super) fn escape(text: &str, to: &mut String) {
    for c in text.chars() {
        match c {
            '<' => to.push_str("&lt;"),
            '>' => to.push_str("&gt;"),
            '&' => to.push_str("&amp;"),
            '"' => to.push_str("&quot;"),
            '\'' => to.push_str("&#39;"),
            // What neither can hold.
            '\0'..='\u{8}' | '\u{b}' | '\u{c}' | '\u{e}'..='\u{1f}' | '\u{fffe}' | '\u{ffff}' => {
                to.push('\u{fffd}')
            }
            c => to.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dashes_go_round_corners_and_a_point_alone_stays() {
        let dashes = Dashes(Some((3.0, 1.0)));
        let pieces = dashes.cut(&[(0.0, 0.0), (2.0, 0.0), (2.0, 4.0)]);
        assert_eq!(pieces, [vec![(0.0, 0.0), (2.0, 0.0), (2.0, 1.0)], vec![(2.0, 2.0), (2.0, 4.0)]]);
        assert_eq!(
            [Dashes::default(), dashes].map(|dashes| dashes.cut(&[(1.0, 1.0)])),
            [[[(1.0, 1.0)]], [[(1.0, 1.0)]]]
        );
        assert_eq!(Dashes::of_round(3), Dashes::default());
    }

    #[test]
    fn text_is_safe_in_html_and_xml() {
        let mut text = String::new();
        escape("<a b='c'>&\u{1}é", &mut text);
        assert_eq!(text, "&lt;a b=&#39;c&#39;&gt;&amp;\u{fffd}é");
    }
}
