//! `[data]`: the tables of training data, of every source and form.

use std::path::PathBuf;

tagged! {
    /// The training data.
    pub enum DataConfig {
        /// conversations, tokenised by the chat template and packed.
        "sft" => Sft(table: SftDataConfig),
        /// made-up tokens, to measure speed.
        "fake" => Fake(table: FakeDataConfig),
    }
}

/// A table of training data: the keys that every type has, then its own.
macro_rules! data_table {
    ($(#[doc = $about:literal])+ pub struct $name:ident: $tag:literal { $($own:tt)* }) => {
        table! {
            $(#[doc = $about])+
            pub struct $name: $tag {
                /// Packed rows per optimizer step, over all ranks.
                batch_size: usize = 128, 1..=16_777_216;
                /// Tokens in a packed row, and the most that a document can have.
                seq_len: usize = 128, 1..=16_777_216;
                /// Packed rows that go through the model at once; the rest of `batch_size` is accumulated.
                micro_batch_size: usize = 1, 1..=16_777_216;
                $($own)*
            }
        }
    };
}

data_table! {
    /// Conversations or text, in any of the forms that `format` lists.
    pub struct SftDataConfig: "sft" {
        /// A file (jsonl, json, csv, parquet; gz and zst too), a pattern for several (`data/*.jsonl`), a local folder of
        /// them (Hugging Face layout), or a hub id (`@revision` for another branch, tag or commit than `main`);
        /// `embertune/reverse-text` is the data inside this program.
        name: String = "PrimeIntellect/Reverse-Text-SFT".into();
        /// Subsets to interleave; one for each of `splits` if both are given. They are what the dataset's card (its
        /// `README.md`) calls configs, or else folders; `None` is the card's default.
        subsets: Option<Vec<String>> = None;
        /// Splits to interleave; `None` is `train`.
        splits: Option<Vec<String>> = None;
        /// What the rows are; `auto` goes by their columns and says what it found. `raw_prompt_completion` has to be
        /// named: plain text without the chat template, trained from the completion on.
        format: DataFormat = DataFormat::Auto;
        /// What the file calls each column.
        columns: ColumnsConfig = ColumnsConfig::default();
        /// What becomes of a document longer than `seq_len`: its `head` or `tail` is kept, it is left out (`drop`), or
        /// the run doesn't start (`error`).
        long_documents: LongDocuments = LongDocuments::Head;
        /// How often each subset or split is drawn from; they sum to 1. `None` takes turns.
        probabilities: Option<Vec<f64>> = None, 0.0..;
        /// When interleaving ends.
        stopping_strategy: StoppingStrategy = StoppingStrategy::AllExhausted;
        /// Shuffle, differently in each epoch.
        shuffle: bool = true;
        /// Seed of the shuffling.
        seed: u64 = 0;
        /// Which roles are trained.
        loss_mask: LossMaskConfig = LossMaskConfig::default();
        /// Keep the tokens of large data (4 MiB and more), for the next run on the same files with the same tokenizer and
        /// settings. What nobody used for 30 days is removed. All others lie in the folder for temporary files (`TMPDIR`)
        /// while the run lives: four bytes a token.
        cache: bool = true;
        /// Where they are kept, small ones too. `None` is `$XDG_CACHE_HOME/embertune/tokens`, or below `~/.cache`.
        cache_dir: Option<PathBuf> = None;
    }
}

choice! {
    /// What rows of data are.
    pub enum DataFormat {
        /// Told by the columns, row by row, in the order of this list (the raw one has to be named).
        "auto" => Auto,
        /// A list of messages with `role` and `content`.
        "messages" => Messages,
        /// A prompt and its completion: strings, messages or lists of them.
        "prompt_completion" => PromptCompletion,
        /// The same as plain text, without the chat template; the completion and the end token are trained.
        "raw_prompt_completion" => RawPromptCompletion,
        /// ShareGPT: a list of turns with `from` and `value`.
        "sharegpt" => ShareGpt,
        /// Alpaca: an instruction, maybe an input, and an output.
        "alpaca" => Alpaca,
        /// Plain text, all of it trained.
        "text" => Text,
        /// Token ids, and labels that are the same ids or -100.
        "pretokenized" => Pretokenized,
    }
}

table! {
    /// What the file calls the columns that mean something; all others are not read.
    pub struct ColumnsConfig {
        /// `messages`: the list of messages.
        messages: String = "messages".into();
        /// `prompt_completion`: context, never trained.
        prompt: String = "prompt".into();
        /// `prompt_completion`: what is trained.
        completion: String = "completion".into();
        /// `sharegpt`: the list of turns.
        conversations: String = "conversations".into();
        /// `alpaca`: what is asked.
        instruction: String = "instruction".into();
        /// `alpaca`: what it is asked about; may be missing or empty.
        input: String = "input".into();
        /// `alpaca`: the answer.
        output: String = "output".into();
        /// `text`: the text.
        text: String = "text".into();
        /// `pretokenized`: token ids.
        input_ids: String = "input_ids".into();
        /// `pretokenized`: the same ids, -100 where a token isn't trained.
        labels: String = "labels".into();
        /// Beside a conversation: a system message to go first.
        system: String = "system".into();
        /// Beside a conversation: the tools, a list or JSON.
        tools: String = "tools".into();
        /// Beside a conversation: further variables for the chat template, an object or JSON.
        chat_template_kwargs: String = "chat_template_kwargs".into();
    }
}

choice! {
    /// What becomes of a document that is longer than a row.
    pub enum LongDocuments {
        /// Its first `seq_len` tokens are kept.
        "head" => Head,
        /// Its last `seq_len` tokens are kept.
        "tail" => Tail,
        /// It has no part in training.
        "drop" => Drop,
        /// The run doesn't start.
        "error" => Error,
    }
}

choice! {
    /// When interleaved sources end.
    pub enum StoppingStrategy {
        /// When every source was used up once; the short ones repeat.
        "all_exhausted" => AllExhausted,
        /// When the first source is used up.
        "first_exhausted" => FirstExhausted,
    }
}

table! {
    /// The roles whose messages are trained; of `prompt` + `completion` rows, those of the completion alone.
    #[derive(Copy, Eq)]
    pub struct LossMaskConfig {
        /// System messages.
        system: bool = false;
        /// User messages.
        user: bool = false;
        /// Assistant messages, with the token that ends them.
        assistant: bool = true;
        /// Tool results.
        tool: bool = false;
    }
}

data_table! {
    /// Made-up tokens.
    pub struct FakeDataConfig: "fake" {
        /// Lengths of the documents.
        length: FakeLength = FakeLength::Fixed;
        /// Part of each document that is trained: its end, as an answer after a prompt.
        trained: f64 = 1.0, 0.0..=1.0;
        /// The tokens.
        input_ids: FakeInputIds = FakeInputIds::Increasing;
        /// Seed of the random ones.
        seed: u64 = 0;
    }
}

choice! {
    /// Lengths of made-up documents.
    pub enum FakeLength {
        /// One document fills a row.
        "fixed" => Fixed,
        /// From 1 to `seq_len - 1` tokens, packed.
        "variable" => Variable,
    }
}

choice! {
    /// Tokens of made-up documents.
    pub enum FakeInputIds {
        /// Each token of document k is k.
        "increasing" => Increasing,
        /// Any token of the vocabulary.
        "random" => Random,
    }
}
