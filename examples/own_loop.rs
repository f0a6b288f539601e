//! A training loop of your own on the two halves of a step, without files or configuration.
//!
//! ```text
//! cargo run --release --example own_loop -- MODEL_DIR DATA.jsonl
//! ```

use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, Device};
use embertune::config::{LoraConfig, OptimConfig, SftDataConfig, TokenizerConfig};
use embertune::data::{ChatTokenizer, Loader};
use embertune::export::{AdapterMeta, save_adapter};
use embertune::hub;
use embertune::model::{Decoder, LoraSpec};
use embertune::train::optim::Optimizer;
use embertune::train::ranks::Ranks;
use embertune::train::step::{StepOptions, forward_backward};

fn main() -> embertune::Result<()> {
    let mut args = std::env::args().skip(1);
    let model = hub::model_dir(&args.next().unwrap_or("embertune/tiny".into()))?;
    let name = args.next().unwrap_or("embertune/reverse-text".into());

    let mut decoder = Decoder::load(&model, DType::F32, &Device::flex(), &mut |_, _| {})?;
    let lora = LoraConfig { rank: 8, alpha: 16.0, ..LoraConfig::default() };
    decoder.attach_lora(&[LoraSpec::from_config(&lora)], 0)?;

    let tokenizer = Arc::new(ChatTokenizer::load(&model, &TokenizerConfig::default())?);
    let data = SftDataConfig { name, batch_size: 4, micro_batch_size: 2, ..SftDataConfig::default() };
    let (vocabulary, longest) = (decoder.config().vocab_size, decoder.config().max_position_embeddings);
    let mut loader = Loader::new(&data, tokenizer, 0, None, vocabulary, longest)?;

    let config = OptimConfig { lr: 1e-3, ..OptimConfig::default() };
    let mut optimizer = Optimizer::new(&config, &decoder.trainable());
    let ranks = Ranks::alone();
    for step in 0..20 {
        let batches = loader.next_step()?.expect("without `num_epochs`, the data has no end");
        let sums = forward_backward(&decoder, &batches, &StepOptions::default())?;
        // With several ranks: `sums.over(&ranks, &decoder)` first.
        if let Some(update) = sums.update(&mut decoder, &mut optimizer, config.lr, config.max_norm, &ranks)? {
            println!("step {step}: loss {:.4}, gradient norm {:.3}", update.loss, update.grad_norm);
        }
    }
    save_adapter(&decoder, 0, Path::new("outputs/own_loop"), &AdapterMeta::default())
}
