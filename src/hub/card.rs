//! A dataset's card: the `configs` in the YAML head of its `README.md`, which say what its subsets and splits are
//! (huggingface.co/docs/hub/datasets-manual-configuration).

use glob::{MatchOptions, Pattern};
use yaml_rust2::{Yaml, YamlLoader};

use super::layout::{are, is_data, missing_shard};

/// One subset: what the card calls a config.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Subset {
    name: String,
    is_default: bool,
    /// Split and pattern, in the order of the card; empty where the card leaves them to the files' names.
    files: Vec<(String, String)>,
    /// The folder that everything lies in.
    folder: Option<String>,
}

/// The subsets that a card names; none without `configs`.
///
/// # Errors
/// YAML that can't be read, or says something else than the hub's tools would understand.
pub(super) fn subsets(card: &str) -> Result<Vec<Subset>, String> {
    let Some(head) = head(card).filter(|head| head.contains("configs:")) else { return Ok(Vec::new()) };
    let yaml = YamlLoader::load_from_str(head).map_err(|e| format!("the head of its `README.md`: {e}"))?;
    let configs = yaml.first().map_or(&Yaml::BadValue, |root| &root["configs"]);
    configs.as_vec().map_or(Ok(Vec::new()), |configs| configs.iter().map(subset).collect())
}

/// What stands between the first two lines of `---`.
pub(super) fn head(card: &str) -> Option<&str> {
    let rest = card.trim_start_matches('\u{feff}').strip_prefix("---")?;
    let rest = rest.strip_prefix("\r\n").or(rest.strip_prefix('\n'))?;
    rest.split_once("\n---").map(|(head, _)| head)
}

fn subset(config: &Yaml) -> Result<Subset, String> {
    let name = config["config_name"].as_str().unwrap_or("default").to_string();
    let is_default = config["default"].as_bool().unwrap_or(name == "default");
    let folder = config["data_dir"].as_str().map(|dir| dir.trim_matches('/').to_string());
    let files = files(&config["data_files"]).ok_or_else(|| {
        format!("its `README.md`: `data_files` of `{name}` is neither paths nor a list of splits")
    })?;
    Ok(Subset { name, is_default, files, folder })
}

/// A pattern, a list of patterns, or a list of `split` and `path` (a pattern or several).
fn files(yaml: &Yaml) -> Option<Vec<(String, String)>> {
    let of_train = |pattern: &str| ("train".to_string(), pattern.to_string());
    match yaml {
        Yaml::BadValue | Yaml::Null => Some(Vec::new()),
        Yaml::String(pattern) => Some(vec![of_train(pattern)]),
        Yaml::Array(items) => {
            let mut all = Vec::new();
            for item in items {
                match item {
                    Yaml::String(pattern) => all.push(of_train(pattern)),
                    Yaml::Hash(_) => {
                        let split = item["split"].as_str().unwrap_or("train");
                        let patterns = patterns(&item["path"])?;
                        all.extend(patterns.into_iter().map(|pattern| (split.to_string(), pattern)));
                    }
                    _ => return None,
                }
            }
            Some(all)
        }
        _ => None,
    }
}

fn patterns(yaml: &Yaml) -> Option<Vec<String>> {
    match yaml {
        Yaml::String(pattern) => Some(vec![pattern.clone()]),
        Yaml::Array(items) => items.iter().map(|item| item.as_str().map(String::from)).collect(),
        _ => None,
    }
}

/// What the card says about one subset.
pub(super) enum Choice<'a> {
    /// These patterns.
    Files(&'a Subset),
    /// All that lies in this folder, by its names.
    Folder(&'a str),
    /// Nothing: names decide, those of folders about the subset.
    ByName(Option<&'a str>),
}

/// The subset of this name, or the one to take without any.
///
/// # Errors
/// Several, of which none is called the default; none of this name, and no such folder either.
pub(super) fn choose<'a>(subsets: &'a [Subset], wanted: Option<&'a str>) -> Result<Choice<'a>, String> {
    let of = |subset: &'a Subset| match &subset.folder {
        _ if !subset.files.is_empty() => Choice::Files(subset),
        Some(folder) => Choice::Folder(folder),
        None => Choice::ByName(None),
    };
    let names: Vec<String> = subsets.iter().map(|subset| subset.name.clone()).collect();
    match wanted {
        Some(name) => match subsets.iter().find(|subset| subset.name == name) {
            Some(subset) => Ok(of(subset)),
            None if subsets.is_empty() => Ok(Choice::ByName(Some(name))),
            None => Err(format!("no subset `{name}`; there {}", are(&names))),
        },
        None => match (subsets, subsets.iter().find(|subset| subset.is_default)) {
            ([], _) => Ok(Choice::ByName(None)),
            (_, Some(default)) | ([default], None) => Ok(of(default)),
            _ => Err(format!(
                "it has several subsets and no default: name one in `data.subsets`; there {}",
                are(&names)
            )),
        },
    }
}

impl Subset {
    /// The files of a split, in the order of the card's patterns, by name within each.
    ///
    /// # Errors
    /// No such split, a pattern that isn't one or that nothing matches, a shard that is missing.
    pub fn split(&self, paths: &[String], split: &str) -> Result<Vec<String>, String> {
        const BY_PART: MatchOptions = MatchOptions {
            case_sensitive: true,
            require_literal_separator: true,
            require_literal_leading_dot: true,
        };
        let mut found: Vec<String> = Vec::new();
        let mut splits: Vec<String> = self.files.iter().map(|(split, _)| split.clone()).collect();
        splits.dedup();
        if !splits.iter().any(|name| name == split) {
            return Err(format!("no split `{split}`; there {}", are(&splits)));
        }
        for (_, pattern) in self.files.iter().filter(|(name, _)| name == split) {
            let whole = match &self.folder {
                Some(folder) => format!("{folder}/{pattern}"),
                None => pattern.trim_start_matches("./").to_string(),
            };
            let pattern = Pattern::new(&whole).map_err(|e| format!("its `README.md`: `{whole}`: {e}"))?;
            let before = found.len();
            let new = |path: &&String| {
                is_data(path) && pattern.matches_with(path, BY_PART) && !found.contains(path)
            };
            found.extend(paths.iter().filter(new).cloned().collect::<Vec<_>>());
            if found.len() == before {
                return Err(format!(
                    "its `README.md` names `{whole}` for the split `{split}`, and no such data file is there"
                ));
            }
        }
        match missing_shard(&found) {
            Some(missing) => Err(format!("`{missing}` is missing")),
            None => Ok(found),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CARD: &str = "---\nlicense: mit\nconfigs:\n- config_name: en\n  data_files:\n  - split: train\n    path: en/part-*.jsonl\n\
        \x20 - split: test\n    path: [\"en/x.jsonl\", \"more/**/y.jsonl\"]\n- config_name: de\n  default: true\n  data_files: \"de/*\"\n\
        - config_name: by_name\n  data_dir: fr\n---\n# Title\nconfigs: not this\n";

    fn split(card: &str, wanted: Option<&str>, split: &str) -> Result<Vec<String>, String> {
        let paths = [
            "de/b.jsonl",
            "de/notes.txt",
            "de/sub/c.jsonl",
            "en/part-1.jsonl",
            "en/part-2.jsonl",
            "en/x.jsonl",
            "more/a/y.jsonl",
        ];
        let subsets = subsets(card)?;
        match choose(&subsets, wanted)? {
            Choice::Files(subset) => subset.split(&paths.map(String::from), split),
            Choice::Folder(folder) => Ok(vec![format!("by name in {folder}")]),
            Choice::ByName(subset) => Ok(vec![format!("by name in {subset:?}")]),
        }
    }

    #[test]
    fn the_card_says_what_subsets_and_splits_are() {
        assert_eq!(split(CARD, Some("en"), "train").unwrap(), ["en/part-1.jsonl", "en/part-2.jsonl"]);
        assert_eq!(split(CARD, Some("en"), "test").unwrap(), ["en/x.jsonl", "more/a/y.jsonl"]);
        assert_eq!(
            split(CARD, None, "train").unwrap(),
            ["de/b.jsonl"],
            "the default; `*` stays in its folder"
        );
        assert_eq!(split(CARD, Some("by_name"), "train").unwrap(), ["by name in fr"]);
        assert_eq!(split(CARD, Some("en"), "dev").unwrap_err(), "no split `dev`; there are `train`, `test`");
        assert_eq!(
            split(CARD, Some("it"), "train").unwrap_err(),
            "no subset `it`; there are `en`, `de`, `by_name`"
        );
        let no_default = CARD.replace("default: true", "default: false");
        assert!(split(&no_default, None, "train").unwrap_err().contains("name one in `data.subsets`"));
        let lost = CARD.replace("en/part-*", "en/lost-*");
        assert!(split(&lost, Some("en"), "train").unwrap_err().contains("names `en/lost-*.jsonl`"));
    }

    #[test]
    fn cards_without_configs_say_nothing() {
        for card in
            ["", "# Title", "---\nlicense: mit\n---\n", "---\nno end", "---\r\nlicense: mit\r\n---\r\n"]
        {
            assert_eq!(subsets(card), Ok(vec![]), "{card:?}");
        }
        assert!(subsets("---\nconfigs: [\n---\n").unwrap_err().contains("README.md"));
        assert!(
            subsets("---\nconfigs:\n- data_files: 3\n---\n")
                .unwrap_err()
                .contains("`data_files` of `default`")
        );
        let crlf = "---\r\nconfigs:\r\n- config_name: a\r\n  data_files: x.jsonl\r\n---\r\n";
        assert_eq!(subsets(crlf).unwrap()[0].files, [("train".into(), "x.jsonl".into())]);
    }
}
