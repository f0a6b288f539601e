//! x
use crate::error::Result;
use crate::model::Decoder;
use std::path::Path;
pub fn load_adapter(_d: &mut Decoder, _run: usize, _dir: &Path) -> Result<()> {
    unimplemented!()
}
