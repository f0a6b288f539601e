//! Which files of a folder or repository make up a model, a tokenizer, or a split of a dataset.

use super::Listing;

/// How a folder of data must look.
pub(super) const LAYOUT_HINT: &str =
    "A folder of data holds files such as `data/train-00000-of-00002.parquet` or `train.jsonl`.";

/// Endings of data files; all but the last may have one of [`PACKED`] behind.
pub(crate) const ENDINGS: [&str; 4] = ["jsonl", "json", "csv", "parquet"];

/// Endings of packed files.
const PACKED: [&str; 2] = ["gz", "zst"];

/// What a data file holds, by its name: `jsonl` for `x.jsonl` and `x.jsonl.gz`.
pub(crate) fn data_ending(path: &str) -> Option<&'static str> {
    let (stem, last) = path.rsplit_once('.')?;
    let packed = PACKED.contains(&last);
    let ending = if packed { stem.rsplit_once('.')?.1 } else { last };
    ENDINGS.into_iter().find(|known| ending.eq_ignore_ascii_case(known) && !(packed && *known == "parquet"))
}

const INDEX: &str = "model.safetensors.index.json";

/// A whole model: config, weights, tokenizer.
pub(super) fn model_files(listing: &dyn Listing) -> Result<Vec<String>, String> {
    let mut files = tokenizer_files(listing)?;
    let has = |path: &str| listing.paths().iter().any(|p| p == path);
    if !has("config.json") {
        return Err("it has no `config.json`".into());
    }
    if !has(INDEX) && !has("model.safetensors") {
        return Err("it has no `model.safetensors` (other forms of weights are not read)".into());
    }
    for path in listing.paths() {
        let is_weight = path.ends_with(".safetensors") && !path.contains('/');
        if is_weight || path == INDEX {
            files.push(path.clone());
        }
    }
    if let Some(index) = listing.read(INDEX) {
        let shards = shards_of(&index).unwrap_or_default();
        if let Some(missing) = shards.iter().find(|shard| !has(shard)) {
            return Err(format!("its shard `{missing}` is missing"));
        }
        // Beside the shards, other copies of the weights may lie there.
        files.retain(|file| !file.ends_with(".safetensors") || shards.contains(file));
    }
    Ok(files)
}

fn shards_of(index: &str) -> Option<Vec<String>> {
    let index: serde_json::Value = serde_json::from_str(index).ok()?;
    let files = index.get("weight_map")?.as_object()?.values();
    let mut files: Vec<String> = files.filter_map(|file| file.as_str().map(str::to_string)).collect();
    files.sort();
    files.dedup();
    Some(files)
}

/// What a tokenizer needs, and the model's small files.
pub(super) fn tokenizer_files(listing: &dyn Listing) -> Result<Vec<String>, String> {
    const WANTED: [&str; 9] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    ];
    let files: Vec<String> =
        listing.paths().iter().filter(|p| WANTED.contains(&p.as_str())).cloned().collect();
    if files.iter().any(|file| file == "tokenizer.json") {
        Ok(files)
    } else {
        Err("it has no `tokenizer.json`".into())
    }
}

/// The data files of one split, sorted; the error names what there is.
pub(super) fn data_files(paths: &[String], subset: Option<&str>, split: &str) -> Result<Vec<String>, String> {
    let data: Vec<&String> = paths.iter().filter(|path| is_data(path)).collect();
    if data.is_empty() {
        let arrow = paths.iter().any(|path| path.ends_with(".arrow"));
        let arrow = if arrow {
            "; it was written by `save_to_disk`: write it with `to_parquet` or `to_json` instead"
        } else {
            ""
        };
        return Err(format!("it holds no {} file{arrow}", ENDINGS.map(|e| format!("`.{e}`")).join(", ")));
    }
    let in_subset: Vec<&String> = match subset {
        None => data.clone(),
        Some(subset) => data.iter().filter(|p| folders(p).any(|f| f == subset)).copied().collect(),
    };
    if in_subset.is_empty() {
        let there = unique(data.iter().flat_map(|p| folders(p)).filter(|f| *f != "data"));
        return Err(format!("no subset `{}`; there {}", subset.unwrap_or_default(), are(&there)));
    }
    let of_split: Vec<&String> = in_subset.iter().filter(|p| belongs(p, split)).copied().collect();
    if of_split.is_empty() {
        let there = unique(in_subset.iter().map(|p| split_of(p)));
        return Err(format!("no split `{split}`; there {}", are(&there)));
    }
    let files = of_one_ending(&of_split);
    if let Some(other) = no_other_form(&of_split, &files) {
        tracing::warn!(
            "`{other}` is left out, as most files here end otherwise; `data.name` may be a pattern (`data/*.jsonl`)"
        );
    }
    match missing_shard(&files) {
        Some(missing) => Err(format!("`{missing}` is missing")),
        None => Ok(files),
    }
}

/// "are `a`, `b`", for messages.
pub(super) fn are(names: &[String]) -> String {
    let listed = names.iter().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
    match names.len() {
        0 => "are none".into(),
        1 => format!("is {listed}"),
        _ => format!("are {listed}"),
    }
}

fn unique<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut names: Vec<String> = names.map(str::to_string).collect();
    names.sort();
    names.dedup();
    names
}

/// Whether a path is of a file that holds rows.
pub(super) fn is_data(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    // What `datasets` and the hub put beside the data.
    let about = ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"];
    data_ending(name).is_some() && !about.contains(&name) && !name.starts_with('.')
}

fn folders(path: &str) -> impl Iterator<Item = &str> {
    path.rsplit_once('/').map_or("", |(folders, _)| folders).split('/').filter(|f| !f.is_empty())
}

/// `train-00000-of-00002` → `train`, and the two numbers; other stems as they are.
fn stem(path: &str) -> (&str, Option<(usize, usize)>) {
    let name = path.rsplit('/').next().unwrap_or(path);
    let unpacked = name.rsplit_once('.').filter(|(_, last)| PACKED.contains(last)).map_or(name, |(n, _)| n);
    let stem = unpacked.rsplit_once('.').map_or(unpacked, |(stem, _)| stem);
    let shard = || {
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (split, number) = rest.rsplit_once('-')?;
        // Some writers put a hash after the count.
        let count = count.split('-').next()?;
        Some((split, (number.parse().ok()?, count.parse().ok()?)))
    };
    shard().map_or((stem, None), |(split, numbers)| (split, Some(numbers)))
}

/// Words that name a split in file and folder names, as `datasets` has them (data_files.py).
const KEYWORDS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "val", "dev"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// The split that a file's name speaks of; without any it is `train`.
fn split_of(path: &str) -> &str {
    let (stem, shard) = stem(path);
    if shard.is_some() {
        return stem;
    }
    let words = |text: &str| {
        text.split(['.', '_', '-', ' ']).find_map(|word| {
            KEYWORDS.iter().find(|(_, words)| words.contains(&word)).map(|(split, _)| *split)
        })
    };
    words(stem).or_else(|| folders(path).find_map(words)).unwrap_or("train")
}

fn belongs(path: &str, split: &str) -> bool {
    let canonical = |name| KEYWORDS.iter().find(|(_, words)| words.contains(&name)).map_or(name, |(s, _)| *s);
    let (stem, _) = stem(path);
    stem == split || folders(path).any(|f| f == split) || canonical(split_of(path)) == canonical(split)
}

/// Where the same data lie in two forms, those of the more frequent ending; parquet if equal.
fn of_one_ending(files: &[&String]) -> Vec<String> {
    let count = |ending: &&'static str| files.iter().filter(|f| data_ending(f) == Some(*ending)).count();
    let Some(ending) = ENDINGS.iter().max_by_key(|ending| (count(ending), **ending == "parquet")) else {
        return Vec::new();
    };
    files.iter().filter(|f| data_ending(f) == Some(*ending)).map(|f| f.to_string()).collect()
}

/// A file that is left out and isn't another form of one that is read.
fn no_other_form<'a>(files: &[&'a String], read: &[String]) -> Option<&'a str> {
    let is_read =
        |file: &str| read.iter().any(|other| stem(other) == stem(file) && folders(other).eq(folders(file)));
    files.iter().map(|file| file.as_str()).find(|file| !is_read(file))
}

/// The name of a shard that should be there and isn't.
pub(super) fn missing_shard(files: &[String]) -> Option<String> {
    for file in files {
        let (name, Some((number, count))) = stem(file) else { continue };
        for wanted in 0..count {
            let there = files.iter().any(|f| {
                let (n, shard) = stem(f);
                n == name && shard == Some((wanted, count)) && folders(f).eq(folders(file))
            });
            if !there {
                return Some(file.replacen(&format!("-{number:05}-of-"), &format!("-{wanted:05}-of-"), 1));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(paths: &[&str], subset: Option<&str>, split: &str) -> Result<Vec<String>, String> {
        let mut paths: Vec<String> = paths.iter().map(|p| p.to_string()).collect();
        paths.sort();
        data_files(&paths, subset, split)
    }

    #[test]
    fn splits_are_told_by_name() {
        let hub = [
            "README.md",
            "data/train-00000-of-00002.parquet",
            "data/train-00001-of-00002.parquet",
            "data/test-00000-of-00001-0123abcd.parquet",
            "dataset_infos.json",
        ];
        assert_eq!(choose(&hub, None, "train").unwrap(), hub[1..3]);
        assert_eq!(choose(&hub, None, "test").unwrap(), hub[3..4]);
        assert_eq!(
            choose(&hub, None, "validation").unwrap_err(),
            "no split `validation`; there are `test`, `train`"
        );
        assert_eq!(
            choose(&hub[1..2], None, "train").unwrap_err(),
            "`data/train-00001-of-00002.parquet` is missing"
        );

        let own = ["factbook_train_929.jsonl", "dev.jsonl", "train_sft.jsonl", "notes.txt"];
        assert_eq!(choose(&own, None, "train").unwrap(), ["factbook_train_929.jsonl", "train_sft.jsonl"]);
        assert_eq!(choose(&own, None, "validation").unwrap(), ["dev.jsonl"]);
        assert_eq!(choose(&own, None, "train_sft").unwrap(), ["train_sft.jsonl"]);
        assert_eq!(choose(&["a.jsonl", "b/c.jsonl"], None, "train").unwrap(), ["a.jsonl", "b/c.jsonl"]);
        let sharded = ["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"];
        assert_eq!(choose(&sharded, None, "train_gen").unwrap(), sharded[1..]);
        assert!(choose(&sharded, None, "train").is_err());
    }

    #[test]
    fn subsets_are_folders() {
        let paths = ["en/train.jsonl", "de/train.jsonl", "de/test.jsonl"];
        assert_eq!(choose(&paths, Some("de"), "train").unwrap(), ["de/train.jsonl"]);
        assert_eq!(choose(&paths, Some("fr"), "train").unwrap_err(), "no subset `fr`; there are `de`, `en`");
    }

    #[test]
    fn one_form_of_the_same_data_is_read() {
        assert_eq!(choose(&["train.jsonl", "train.parquet"], None, "train").unwrap(), ["train.parquet"]);
        let left_out = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
            let files: Vec<&String> = names.iter().collect();
            no_other_form(&files, &of_one_ending(&files)).map(str::to_string)
        };
        assert_eq!(left_out(&["a.csv", "b.csv", "b.jsonl"]), None);
        assert_eq!(left_out(&["a.csv", "b.csv", "c.jsonl"]), Some("c.jsonl".into()));
        let packed = ["data/train-00000-of-00002.jsonl.gz", "data/train-00001-of-00002.jsonl.gz"];
        assert_eq!(choose(&packed, None, "train").unwrap(), packed);
        assert_eq!(choose(&["test.csv.zst", "x.zst"], None, "test").unwrap(), ["test.csv.zst"]);
        assert!(
            choose(&["data-00000-of-00001.arrow", "state.json"], None, "train")
                .unwrap_err()
                .contains("save_to_disk")
        );
    }
}
