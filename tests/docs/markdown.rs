//! As much of Markdown as the pages of `docs/` use.

/// A fenced block: the words behind its fence, what it holds, and the line of its fence.
pub struct Block {
    pub info: String,
    pub text: String,
    pub line: usize,
}

pub fn blocks(page: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut inside = false;
    for (n, line) in page.lines().enumerate() {
        match line.strip_prefix("```") {
            Some(info) if !inside => {
                blocks.push(Block { info: info.into(), text: String::new(), line: n + 1 });
                inside = true;
            }
            Some(_) => inside = false,
            None if inside => {
                let block = blocks.last_mut().expect("inside a block");
                block.text += &format!("{line}\n");
            }
            None => {}
        }
    }
    assert!(!inside, "a fence is open at the end of the page");
    blocks
}

/// What stands between backticks outside of fenced blocks.
pub fn spans(page: &str) -> Vec<String> {
    let mut inside = false;
    let mut spans = Vec::new();
    for line in page.lines() {
        if line.starts_with("```") {
            inside = !inside;
        } else if !inside {
            // A double one lets single ones stand inside.
            let line = line.replace("``", "");
            spans.extend(line.split('`').skip(1).step_by(2).map(String::from));
        }
    }
    spans
}

/// A row of a table with three columns, the header of its table, and its line.
pub struct Row {
    pub header: Vec<String>,
    pub cells: Vec<String>,
    pub line: usize,
}

pub fn rows(page: &str) -> Vec<Row> {
    let (mut rows, mut header) = (Vec::new(), Vec::new());
    for (n, line) in page.lines().enumerate() {
        let Some(inner) = line.strip_prefix('|').and_then(|l| l.strip_suffix('|')) else {
            header.clear();
            continue;
        };
        let cells: Vec<String> = inner.split('|').map(|cell| cell.trim().to_string()).collect();
        assert_eq!(cells.len(), 3, "line {}: {line}", n + 1);
        if header.is_empty() {
            header = cells;
        } else if !cells[0].starts_with("--") {
            rows.push(Row { header: header.clone(), cells, line: n + 1 });
        }
    }
    rows
}
