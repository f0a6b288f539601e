#!/usr/bin/env python3
"""How fast, and with which words, transformers answers on the CPU, beside `embertune generate`.

usage: python3 tools/parity/generate.py EMBERTUNE MODEL [--threads 2] [--new 128] [--rounds 5] [--dtypes float32 bfloat16]

Greedy, one prompt at a time, the stop token ignored by neither. All take turns, round by round, each in a process of its own
that has loaded the model and answered once before; medians are printed. Prefill: all prompt tokens to the first new one; decode:
the new tokens after the first. With --check the texts must be equal to those of float32. Needs torch and transformers.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time

QUESTION = "Write a long story about a lighthouse keeper who finds a map. "
CONTEXT = "The sea was calm that night and the lamp turned slowly above the rocks while the gulls slept. " * 12
PROMPTS = {"short": QUESTION, "long": QUESTION + CONTEXT}


def serve(args):
    """The process of one dtype: a line in (the prompt's name), a line of JSON out."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.serve)).eval()

    def answer(prompt, new):
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        times = []

        class Clock:
            def put(self, _):
                times.append(time.perf_counter())

            def end(self):
                pass

        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=new, do_sample=False, streamer=Clock())
        # The streamer hears of the prompt first.
        tokens, n = out[0, ids["input_ids"].shape[1] :], ids["input_ids"].shape[1]
        prefill, decode = times[1] - start, times[-1] - times[1]
        return dict(prompt_tokens=n, prefill=n / prefill, decode=(len(times) - 2) / decode, text=tokenizer.decode(tokens, skip_special_tokens=True))

    answer("Hello", 8)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(PROMPTS[line.strip()], args.new)), flush=True)


def ours(args, name):
    command = [args.embertune, "generate", "--model", args.model, "--device", "flex", "--json", "--max-new-tokens", str(args.new), PROMPTS[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"RAYON_NUM_THREADS": str(args.threads)})
    row = json.loads(done.stdout)
    read, seconds, _, _, rate = re.search(r"(\d+) tokens read in ([\d.]+) s; then (\d+) written in ([\d.]+) s, ([\d.]+) a", done.stderr).groups()
    return dict(prompt_tokens=int(read), prefill=int(read) / float(seconds), decode=float(rate), text=row["text"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("embertune")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    peers = {}
    for dtype in args.dtypes:
        command = [sys.executable, __file__, *sys.argv[1:], "--serve", dtype]
        peers[dtype] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": str(args.threads)})
        assert peers[dtype].stdout.readline() == "ready\n"

    def theirs(dtype, name):
        peers[dtype].stdin.write(name + "\n")
        peers[dtype].stdin.flush()
        return json.loads(peers[dtype].stdout.readline())

    for name in PROMPTS:
        found = {}
        for _ in range(args.rounds):
            found.setdefault("embertune", []).append(ours(args, name))
            for dtype in args.dtypes:
                found.setdefault(dtype, []).append(theirs(dtype, name))
        for who, runs in found.items():
            prefill, decode = ([run[key] for run in runs] for key in ("prefill", "decode"))
            spread = lambda x: f"{statistics.median(x):7.1f} tokens/s ({min(x):.1f} to {max(x):.1f})"
            print(f"{name} ({runs[0]['prompt_tokens']} tokens)  {who:10}  prefill {spread(prefill)}  decode {spread(decode)}", flush=True)
        if args.check:
            assert found["embertune"][0]["text"] == found["float32"][0]["text"], (found["embertune"][0]["text"], found["float32"][0]["text"])
    for peer in peers.values():
        peer.stdin.close()


main()
