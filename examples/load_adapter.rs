//! Load a PEFT adapter onto its base model and see what it changes: the most likely next token.
//!
//! ```text
//! cargo run --release --example load_adapter -- MODEL_DIR ADAPTER_DIR "Hello"
//! ```

use std::path::Path;

use burn::tensor::{DType, Device};
use embertune::config::TokenizerConfig;
use embertune::data::{Batch, ChatTokenizer};
use embertune::export::load_adapter;
use embertune::hub;
use embertune::model::Decoder;

fn main() -> embertune::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, adapter, text] = args.as_slice() else {
        eprintln!("usage: load_adapter MODEL_DIR ADAPTER_DIR TEXT");
        std::process::exit(2);
    };
    let model = hub::model_dir(model)?;
    let tokenizer = ChatTokenizer::load(&model, &TokenizerConfig::default())?;
    let mut decoder = Decoder::load(&model, DType::F32, &Device::flex(), &mut |_, _| {})?;

    println!("base:    {}", next_token(&decoder, &tokenizer, text)?);
    let report = load_adapter(&mut decoder, 0, Path::new(adapter))?;
    println!("adapter: {} ({} modules)", next_token(&decoder, &tokenizer, text)?, report.modules);
    Ok(())
}

fn next_token(decoder: &Decoder, tokenizer: &ChatTokenizer, text: &str) -> embertune::Result<String> {
    let input_ids = tokenizer.encode_text(text)?;
    let t = input_ids.len();
    let batch = Batch {
        input_ids,
        position_ids: (0..t as u32).collect(),
        targets: vec![0; t],
        loss_mask: vec![false; t],
        cu_seqlens: vec![0, t as u32],
        run_tokens: vec![t],
        streams: vec![Default::default()],
    };
    let logits = decoder.logits(&decoder.inputs(&batch, None)?);
    let last = logits.narrow(0, t - 1, 1).argmax(1).to_data().iter::<i64>().next().expect("one id");
    Ok(format!("{:?}", tokenizer.decode(&[last as u32], false)?))
}
