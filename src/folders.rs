//! Where this program keeps what it can make or fetch again.

use std::path::PathBuf;

/// A variable of the environment that isn't empty.
pub(crate) fn variable(key: &str) -> Option<PathBuf> {
    std::env::var_os(key).filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// `$XDG_CACHE_HOME`, else `~/.cache`, else the folder for temporary files.
pub(crate) fn user_cache() -> PathBuf {
    let home = || variable("HOME").or_else(|| variable("USERPROFILE")).map(|home| home.join(".cache"));
    variable("XDG_CACHE_HOME").or_else(home).unwrap_or_else(std::env::temp_dir)
}

/// Our folder in it.
pub(crate) fn cache() -> PathBuf {
    user_cache().join("embertune")
}
