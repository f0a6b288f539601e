//! Files compiled into the program: the tiny model and data of the default run.

/// A folder that is compiled in.
pub(crate) struct Asset {
    /// What `[model] name` or `[data] name` calls it.
    pub name: &'static str,
    /// Path inside the folder, and content.
    pub files: &'static [(&'static str, &'static [u8])],
}

/// All of them.
pub(crate) const ASSETS: &[Asset] = &[];
