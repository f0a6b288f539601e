//! `report.html`: one page about a run that needs nothing else, no other file, no network, no script.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::sheet::escape;
use crate::config::Difference;

/// All that a page shows; what is empty is left out.
#[derive(Debug, Clone, Default)]
pub struct Page {
    /// The run's name.
    pub title: String,
    /// What it came to, in a sentence.
    pub verdict: String,
    /// The model, the device and the time, in a line.
    pub about: String,
    /// Numbers to see first: what it is, and its value.
    pub numbers: Vec<(String, String)>,
    /// The runs of a job, the best first.
    pub runs: Vec<RunLine>,
    /// The curves, as an SVG.
    pub curves: Option<String>,
    /// Why there are no curves.
    pub no_curves: String,
    /// Generated answers by prompt; of each prompt by step.
    pub samples: Vec<(String, Vec<(usize, String)>)>,
    /// Folders of the result: what it is, and where.
    pub results: Vec<(String, String)>,
    /// What to do next, and the command.
    pub commands: Vec<(String, String)>,
    /// Where the commands have to be called.
    pub folder: String,
    /// Keys that aren't at their defaults.
    pub differences: Vec<Difference>,
    /// The whole configuration, as TOML.
    pub config: String,
    /// What the data are.
    pub data: Vec<(String, String)>,
    /// Machine, program and model.
    pub environment: Vec<(String, String)>,
    /// What to be warned of.
    pub warnings: Vec<String>,
}

/// One run of a job.
#[derive(Debug, Clone, Default)]
pub struct RunLine {
    /// Its name.
    pub name: String,
    /// Its own page, from the job's folder.
    pub link: String,
    /// Steps done.
    pub steps: usize,
    /// Loss of the last step.
    pub loss: Option<f64>,
    /// Last held-out loss.
    pub val_loss: Option<f64>,
}

/// Text of a page, grown piece by piece: what isn't a literal is escaped.
struct Html(String);

impl Html {
    fn raw(&mut self, html: &str) -> &mut Self {
        self.0 += html;
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        escape(text, &mut self.0);
        self
    }

    /// `<tag>text</tag>`; the tag may have attributes.
    fn element(&mut self, tag: &str, text: &str) -> &mut Self {
        let name = tag.split(' ').next().unwrap_or(tag);
        self.raw("<").raw(tag).raw(">").text(text).raw("</").raw(name).raw(">\n")
    }

    fn heading(&mut self, text: &str) -> &mut Self {
        self.element("h2", text)
    }

    fn pairs(&mut self, pairs: &[(String, String)]) {
        self.raw("<div class=\"wide\"><table>\n");
        for (name, value) in pairs {
            self.raw("<tr>").element("th scope=\"row\"", name).element("td", value).raw("</tr>\n");
        }
        self.raw("</table></div>\n");
    }
}

impl Page {
    /// The page as HTML.
    pub fn html(&self) -> String {
        let mut html = Html(String::new());
        html.raw("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n").raw(GENERATOR);
        // Nothing is loaded, whatever a prompt may hold.
        html.raw(
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; \
             img-src data:\">\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <link rel=\"icon\" href=\"data:,\">\n",
        );
        html.element("title", &format!("{} · embertune", self.title));
        html.raw("<style>\n").raw(include_str!("page.css")).raw("</style>\n</head>\n<body>\n");
        self.head(&mut html);
        self.runs(&mut html);
        self.curves(&mut html);
        self.samples(&mut html);
        self.results(&mut html);
        self.config(&mut html);
        for (heading, pairs) in [("Data", &self.data), ("Environment", &self.environment)] {
            if !pairs.is_empty() {
                html.heading(heading).pairs(pairs);
            }
        }
        html.raw("</body>\n</html>\n");
        html.0
    }

    fn head(&self, html: &mut Html) {
        html.element("h1", &self.title).element("p", &self.verdict).element("p class=\"muted\"", &self.about);
        for warning in &self.warnings {
            html.element("p class=\"warning\"", &format!("Warning: {warning}"));
        }
        if !self.numbers.is_empty() {
            html.raw("<div class=\"numbers\">\n");
            for (name, value) in &self.numbers {
                html.raw("<div><b>").text(value).raw("</b>").text(name).raw("</div>\n");
            }
            html.raw("</div>\n");
        }
    }

    fn runs(&self, html: &mut Html) {
        if self.runs.is_empty() {
            return;
        }
        html.heading("Runs").raw("<div class=\"wide\"><table>\n<tr>");
        html.element("th scope=\"col\"", "run");
        for column in ["steps", "last loss", "held-out loss"] {
            html.element("th scope=\"col\" class=\"number\"", column);
        }
        html.raw("</tr>\n");
        let number = |value: Option<f64>| value.map_or("–".into(), |value| format!("{value:.4}"));
        for run in &self.runs {
            html.raw("<tr><td><a href=\"").text(&run.link).raw("\">").text(&run.name).raw("</a></td>");
            for value in [run.steps.to_string(), number(run.loss), number(run.val_loss)] {
                html.element("td class=\"number\"", &value);
            }
            html.raw("</tr>\n");
        }
        html.raw("</table></div>\n");
    }

    fn curves(&self, html: &mut Html) {
        html.heading("Curves");
        match &self.curves {
            Some(svg) => html.raw("<div class=\"wide\">").raw(svg).raw("</div>\n"),
            None => html.element("p class=\"muted\"", &self.no_curves),
        };
    }

    fn samples(&self, html: &mut Html) {
        if self.samples.is_empty() {
            return;
        }
        html.heading("Samples");
        for (prompt, answers) in &self.samples {
            html.element("div class=\"prompt\"", prompt);
            let Some(((step, newest), earlier)) = answers.split_last() else { continue };
            html.element("p class=\"muted\"", &format!("after step {step}"))
                .element("div class=\"answer\"", newest);
            if earlier.is_empty() {
                continue;
            }
            html.raw("<details><summary>Earlier answers (")
                .text(&earlier.len().to_string())
                .raw(")</summary>\n");
            for (step, answer) in earlier.iter().rev() {
                html.element("p class=\"muted\"", &format!("after step {step}"));
                html.element("div class=\"answer\"", answer);
            }
            html.raw("</details>\n");
        }
    }

    fn results(&self, html: &mut Html) {
        if self.results.is_empty() && self.commands.is_empty() {
            return;
        }
        html.heading("Result");
        if !self.results.is_empty() {
            html.pairs(&self.results);
        }
        if !self.commands.is_empty() && !self.folder.is_empty() {
            html.raw("<p class=\"muted\">Commands for a shell in <code>")
                .text(&self.folder)
                .raw("</code></p>\n");
        }
        for (what, command) in &self.commands {
            html.element("p", what).element("pre", command);
        }
    }

    fn config(&self, html: &mut Html) {
        if self.config.is_empty() {
            return;
        }
        html.heading("Configuration");
        if self.differences.is_empty() {
            html.element("p class=\"muted\"", "The defaults.");
        } else {
            html.raw("<div class=\"wide\"><table>\n<tr><th>key</th><th>value</th><th>default</th></tr>\n");
            for Difference { key, value, default } in &self.differences {
                html.raw("<tr><td><code>").text(key).raw("</code></td><td><code>").text(value);
                html.raw("</code></td><td class=\"muted\"><code>").text(default).raw("</code></td></tr>\n");
            }
            html.raw("</table></div>\n");
        }
        html.raw("<details><summary>All keys, as a file</summary>")
            .element("pre", &self.config)
            .raw("</details>\n");
    }
}

/// Whether a file is such a page.
pub fn is_page(path: &Path) -> bool {
    start_of(path).is_some_and(|start| start.contains(GENERATOR))
}

/// What a page is known by.
const GENERATOR: &str = "<meta name=\"generator\" content=\"embertune\">\n";

/// The first letters of a file, where it can be read.
pub(super) fn start_of(path: &Path) -> Option<String> {
    let mut start = Vec::new();
    File::open(path).ok()?.take(1000).read_to_end(&mut start).ok()?;
    Some(String::from_utf8_lossy(&start).into_owned())
}

/// An argument as a shell takes it.
pub fn shell_quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./@:=,+%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_string()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

/// `1 h 2 min`, `32.3 s`.
pub fn duration(seconds: f64) -> String {
    let mut text = String::new();
    let minutes = (seconds / 60.0).round() as u64;
    let _ = match seconds {
        s if s < 100.0 => write!(text, "{s:.1} s"),
        s if s < 6000.0 => write!(text, "{minutes} min"),
        _ => write!(text, "{} h {} min", minutes / 60, minutes % 60),
    };
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page of what a malicious data set or folder name could hold.
    fn page() -> Page {
        let bad = "<script src=http://evil.example/x.js>alert('\"&\u{1}')</script>".to_string();
        let pair = || vec![(bad.clone(), bad.clone())];
        let difference = Difference { key: bad.clone(), default: bad.clone(), value: bad.clone() };
        Page {
            title: bad.clone(),
            verdict: bad.clone(),
            about: bad.clone(),
            numbers: pair(),
            runs: vec![RunLine { name: bad.clone(), link: bad.clone(), ..RunLine::default() }],
            no_curves: bad.clone(),
            samples: vec![(bad.clone(), vec![(1, bad.clone()), (2, bad.clone())])],
            results: pair(),
            commands: pair(),
            folder: bad.clone(),
            differences: vec![difference],
            config: bad.clone(),
            data: pair(),
            environment: pair(),
            warnings: vec![bad],
            curves: None,
        }
    }

    /// Names of the elements that are open at each point; panics where they don't nest.
    fn assert_nested(html: &str) {
        let void = ["meta", "link", "!DOCTYPE"];
        let mut open: Vec<&str> = Vec::new();
        for piece in html.split('<').skip(1) {
            let (tag, _) = piece.split_once('>').unwrap_or_else(|| panic!("`<{piece}` doesn't end"));
            let name = tag.split([' ', '\n']).next().unwrap();
            match name.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop(), Some(name), "{html}"),
                None if void.contains(&name) || tag.ends_with('/') => {}
                None => open.push(name),
            }
        }
        assert_eq!(open, [""; 0]);
    }

    #[test]
    fn everything_is_escaped() {
        let html = page().html();
        assert_nested(&html);
        assert!(!html.contains("<script") && !html.contains('\u{1}'), "{html}");
        // Twenty places, in all of which it can be read.
        let shown =
            "&lt;script src=http://evil.example/x.js&gt;alert(&#39;&quot;&amp;\u{fffd}&#39;)&lt;/script&gt;";
        assert_eq!(html.matches(shown).count(), html.matches("evil.example").count());
        assert!(html.matches(shown).count() >= 20, "{}", html.matches(shown).count());
    }

    #[test]
    fn nothing_is_loaded() {
        let html = page().html();
        for word in ["src=\"", "url(", "@import", "<link rel=\"stylesheet"] {
            assert!(!html.contains(word), "{word}");
        }
        assert!(html.contains("default-src 'none'"));
    }

    #[test]
    fn an_empty_page_has_no_empty_parts() {
        let html = Page { no_curves: "no row yet".into(), ..Page::default() }.html();
        assert_nested(&html);
        assert_eq!(html.matches("<h2>").count(), 1);
        assert!(html.contains("no row yet"));
    }

    #[test]
    fn durations_are_short() {
        assert_eq!([32.31, 300.0, 7500.0].map(duration), ["32.3 s", "5 min", "2 h 5 min"]);
    }
}
