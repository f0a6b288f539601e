//! Files compiled into the program: the tiny model and data of the default run (`assets/README.md`).

/// A folder that is compiled in.
pub(crate) struct Asset {
    /// What `[model] name` or `[data] name` calls it.
    pub name: &'static str,
    /// Path inside the folder, and content.
    pub files: &'static [(&'static str, &'static [u8])],
}

macro_rules! folder {
    ($name:literal, $folder:literal: $($file:literal),+) => {
        Asset { name: $name, files: &[$(($file, include_bytes!(concat!("../assets/", $folder, "/", $file)))),+] }
    };
}

/// All of them.
pub(crate) const ASSETS: &[Asset] = &[
    folder!("embertune/tiny", "tiny": "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    folder!("embertune/reverse-text", "reverse-text": "train.jsonl", "validation.jsonl"),
];

/// Whether `name` is one of them.
pub(crate) fn is_embedded(name: &str) -> bool {
    ASSETS.iter().any(|asset| asset.name == name)
}
