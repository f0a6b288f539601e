"""Tokens a second of `datasets.map` + transformers on a file of chats: what `tests/stream.rs speed` is held against.

    python tools/parity/tokenise.py TOKENIZER FILE.jsonl --processes 2
"""

import argparse
import os
import tempfile
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # `map` has processes

from datasets import load_dataset  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("tokenizer")
parser.add_argument("file")
parser.add_argument("--processes", type=int, default=2)
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)


def encode(rows):
    texts = tokenizer.apply_chat_template(rows["messages"], tokenize=False)
    return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}


with tempfile.TemporaryDirectory() as cache:
    rows = load_dataset("json", data_files=args.file, split="train", cache_dir=cache)
    before, clock = os.times(), time.time()
    encoded = rows.map(encode, batched=True, num_proc=args.processes, remove_columns=rows.column_names)
    seconds, after = time.time() - clock, os.times()
    tokens = sum(len(ids) for batch in encoded.iter(1000) for ids in batch["input_ids"])

cpu = sum(after[:4]) - sum(before[:4])
print(
    f"{len(encoded)} rows, {tokens / 1e6:.2f} M tokens in {seconds:.2f} s, {cpu:.2f} s of processor: "
    f"{tokens / seconds / 1e6:.3f} M tokens/s, {tokens / cpu / 1e6:.3f} M a processor second"
)
