//! What several test programs share.

pub mod goldens;
pub mod hub;
pub mod neutral;
pub mod next;
pub mod run;
pub mod sha256;
pub mod train_goldens;
