//! Makes what the embedded default is made from: a tokenizer, an untrained Qwen3-shaped model and
//! the data, all from the public-domain text in `assets/source/`.
//!
//! `tools/make_assets.sh` runs this, pretrains the model with the `embertune` command itself and
//! puts the result into `assets/`.
//!
//! usage: make_assets SOURCE_DIR OUT_DIR

use std::collections::HashMap;
use std::error::Error;
use std::fs;
use std::path::Path;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

/// Qwen's tokens in their order, and whether each is flagged special.
const ADDED_TOKENS: [(&str, bool); 26] = [
    ("<|endoftext|>", true),
    ("<|im_start|>", true),
    ("<|im_end|>", true),
    ("<|object_ref_start|>", true),
    ("<|object_ref_end|>", true),
    ("<|box_start|>", true),
    ("<|box_end|>", true),
    ("<|quad_start|>", true),
    ("<|quad_end|>", true),
    ("<|vision_start|>", true),
    ("<|vision_end|>", true),
    ("<|vision_pad|>", true),
    ("<|image_pad|>", true),
    ("<|video_pad|>", true),
    ("<tool_call>", false),
    ("</tool_call>", false),
    ("<|fim_prefix|>", false),
    ("<|fim_middle|>", false),
    ("<|fim_suffix|>", false),
    ("<|fim_pad|>", false),
    ("<|repo_name|>", false),
    ("<|file_sep|>", false),
    ("<tool_response>", false),
    ("</tool_response>", false),
    ("<think>", false),
    ("</think>", false),
];
/// Qwen's split pattern.
const SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const VOCABULARY: usize = 2048;
const HIDDEN: usize = 160;
const INTERMEDIATE: usize = 448;
const LAYERS: usize = 5;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 48;
/// Every tenth paragraph is kept out of pretraining; its sentences are the held-out set.
const HELD_OUT_EVERY: usize = 10;
const SYSTEM_PROMPT: &str =
    "Reverse the text character-by-character. Put your answer in <reversed_text> tags.";
const REVERSE_ROWS: (usize, usize) = (480, 64);

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [source, out] = args.as_slice() else { return Err("usage: make_assets SOURCE_DIR OUT_DIR".into()) };
    let (source, out) = (Path::new(source), Path::new(out));
    for folder in ["untrained", "pretrain", "reverse-text"] {
        fs::create_dir_all(out.join(folder))?;
    }
    let paragraphs = read_rows(&source.join("factbook_paragraphs.jsonl"))?;
    let conversations = read_rows(&source.join("jargon_instruct.jsonl"))?;

    let held_out = |i: usize| i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1;
    let mut train_text: Vec<&Value> = Vec::new();
    let mut held_out_text: Vec<&Value> = Vec::new();
    for (i, row) in paragraphs.iter().enumerate() {
        if held_out(i) { held_out_text.push(row) } else { train_text.push(row) }
    }

    let mut texts: Vec<String> = train_text.iter().map(|row| text_of(row)).collect();
    texts.extend(
        conversations.iter().map(|row| row["messages"][1]["content"].as_str().unwrap_or("").to_string()),
    );
    write_tokenizer(&texts, &out.join("untrained"))?;
    write_model(&out.join("untrained"))?;
    write_pretraining(&train_text, &held_out_text, &conversations, out)?;
    write_reverse_text(&train_text, REVERSE_ROWS.0, &out.join("reverse-text/train.jsonl"))?;
    write_reverse_text(&held_out_text, REVERSE_ROWS.1, &out.join("reverse-text/validation.jsonl"))
}

fn read_rows(path: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

fn write_rows(path: &Path, rows: &[Value]) -> Result<()> {
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    Ok(fs::write(path, lines)?)
}

fn text_of(row: &Value) -> String {
    row["text"].as_str().unwrap_or("").to_string()
}

/// A byte-level BPE tokenizer with Qwen's pipeline, added tokens and chat template.
fn write_tokenizer(texts: &[String], out: &Path) -> Result<()> {
    let trainer = BpeTrainerBuilder::new()
        .vocab_size(VOCABULARY - ADDED_TOKENS.len())
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .show_progress(false)
        .build();
    let byte_level = ByteLevel::new(false, false, false);
    let split = Split::new(SplitPattern::Regex(SPLIT.into()), SplitDelimiterBehavior::Isolated, false)?;
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer.with_normalizer(Some(NFC))?;
    tokenizer.with_pre_tokenizer(Some(Sequence::new(vec![split.into(), byte_level.into()])));
    tokenizer.with_post_processor(Some(byte_level));
    tokenizer.with_decoder(Some(byte_level));
    tokenizer.train(&mut TrainerWrapper::from(trainer), texts.iter().map(String::as_str))?;
    for (content, special) in ADDED_TOKENS {
        let token = AddedToken::from(content, special).normalized(false);
        if special {
            tokenizer.add_special_tokens([token])?;
        } else {
            tokenizer.add_tokens([token])?;
        }
    }
    assert_eq!(tokenizer.get_vocab_size(true), VOCABULARY, "the text is too small for the vocabulary");
    tokenizer.save(out.join("tokenizer.json"), false)?;

    let template = include_str!("../assets/source/chat_template.jinja");
    let config = json!({
        "add_bos_token": false,
        "bos_token": null,
        "chat_template": template,
        "clean_up_tokenization_spaces": false,
        "eos_token": "<|im_end|>",
        "model_max_length": 1024,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": null,
    });
    Ok(fs::write(out.join("tokenizer_config.json"), serde_json::to_string_pretty(&config)?)?)
}

/// A Qwen3-shaped model with tied embeddings, weights ~ N(0, 0.02²) as Hugging Face initialises them.
fn write_model(out: &Path) -> Result<()> {
    let first_added = VOCABULARY - ADDED_TOKENS.len();
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": first_added,
        "eos_token_id": first_added + 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": 1024,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_scaling": null,
        "rope_theta": 10000,
        "tie_word_embeddings": true,
        "torch_dtype": "bfloat16",
        "use_cache": true,
        "use_sliding_window": false,
        "vocab_size": VOCABULARY,
    });
    fs::write(out.join("config.json"), serde_json::to_string_pretty(&config)?)?;

    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![VOCABULARY, HIDDEN]),
        ("model.norm.weight".into(), vec![HIDDEN]),
    ];
    for layer in 0..LAYERS {
        let name = |suffix: &str| format!("model.layers.{layer}.{suffix}.weight");
        shapes.extend([
            (name("input_layernorm"), vec![HIDDEN]),
            (name("post_attention_layernorm"), vec![HIDDEN]),
            (name("self_attn.q_norm"), vec![HEAD_DIM]),
            (name("self_attn.k_norm"), vec![HEAD_DIM]),
            (name("self_attn.q_proj"), vec![HEADS * HEAD_DIM, HIDDEN]),
            (name("self_attn.k_proj"), vec![KV_HEADS * HEAD_DIM, HIDDEN]),
            (name("self_attn.v_proj"), vec![KV_HEADS * HEAD_DIM, HIDDEN]),
            (name("self_attn.o_proj"), vec![HIDDEN, HEADS * HEAD_DIM]),
            (name("mlp.gate_proj"), vec![INTERMEDIATE, HIDDEN]),
            (name("mlp.up_proj"), vec![INTERMEDIATE, HIDDEN]),
            (name("mlp.down_proj"), vec![HIDDEN, INTERMEDIATE]),
        ]);
    }
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes
        .into_iter()
        .map(|(name, shape)| {
            let n = shape.iter().product();
            let values: Vec<f32> = if name.contains("norm") {
                vec![1.0; n]
            } else {
                (0..n).map(|_| 0.02 * normal(&mut rng)).collect()
            };
            (name, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
        })
        .collect();
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| Ok((name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes)?)))
        .collect::<Result<Vec<_>>>()?;
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    Ok(safetensors::serialize_to_file(views, Some(metadata), &out.join("model.safetensors"))?)
}

/// Box and Muller's transform of two uniform numbers.
fn normal(rng: &mut ChaCha8Rng) -> f32 {
    let mut uniform = || (f64::from(rng.next_u32()) + 0.5) / 2f64.powi(32);
    ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32
}

/// Prose as plain text, and conversations so that the chat tokens are trained too.
fn write_pretraining(
    train: &[&Value],
    held_out: &[&Value],
    conversations: &[Value],
    out: &Path,
) -> Result<()> {
    let prose = |rows: &[&Value]| rows.iter().map(|row| json!({"text": text_of(row)})).collect::<Vec<_>>();
    write_rows(&out.join("pretrain/prose.jsonl"), &prose(train))?;
    write_rows(&out.join("held_out.jsonl"), &prose(held_out))?;
    write_rows(&out.join("pretrain/chat.jsonl"), conversations)
}

/// Sentences to be reversed, evenly over the paragraphs.
fn write_reverse_text(paragraphs: &[&Value], rows: usize, path: &Path) -> Result<()> {
    let sentences: Vec<String> = paragraphs
        .iter()
        .flat_map(|row| {
            text_of(row).split_inclusive(['.', ';']).map(|s| s.trim().to_string()).collect::<Vec<_>>()
        })
        .filter(|s| (40..=140).contains(&s.chars().count()) && s.is_ascii())
        .collect();
    assert!(sentences.len() >= rows, "{} sentences for {rows} rows", sentences.len());
    let rows: Vec<Value> = (0..rows)
        .map(|i| {
            let text = &sentences[i * sentences.len() / rows];
            let reversed: String = text.chars().rev().collect();
            json!({
                "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": text}],
                "completion": [{"role": "assistant", "content": format!("<reversed_text>\n{reversed}\n</reversed_text>")}],
            })
        })
        .collect();
    write_rows(path, &rows)
}
