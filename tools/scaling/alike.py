"""Checks on the devices of one host that ranks train as one, and end together.

    python tools/scaling/alike.py target/release/embertune --device cuda --ranks 2
    python tools/scaling/alike.py target/release/embertune --device flex --ranks 3      # threads alone, on any machine

The tiny model inside the program in f32, on made-up conversations of uneven length: dropout, accumulation, steps of 6 rows, a last
step with fewer rows than ranks, held-out loss, LoRA and full fine-tuning. 1 rank against R in threads and in processes; checkpoints
that go on with another number of ranks; a rank that is killed; a master that isn't there. Needs Python alone.
"""

import argparse, json, os, struct, subprocess, sys, tempfile, time
from pathlib import Path

from job import devices, kill_a_rank, steps


def rows_of_text(count):
    for n in range(count):
        yield {"messages": [{"role": "user", "content": f"row {n}?"}, {"role": "assistant", "content": "so it is " * (1 + n * n % 11) + str(n)}]}


class Job:
    def __init__(self, args, folder):
        self.args, self.folder, self.failures = args, Path(folder), []
        write = lambda name, count: (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows_of_text(count)))
        # 6 rows a step divide neither.
        write("train.jsonl", 67), write("held_out.jsonl", 5)
        (self.folder / "lora.toml").write_text("[model.lora]\nrank = 4\nalpha = 8.0\ndropout = 0.1\n")
        (self.folder / "full.toml").write_text("")

    def command(self, kind, out, ranks, processes=False, more=()):
        start = ["launch", "--ranks", str(ranks), "--"] if processes else []
        device = self.args.device if processes else devices(self.args.device, ranks)
        return [self.args.embertune, *start, "sft", "@", f"{kind}.toml", "--model.name", "embertune/tiny", "--model.dtype", "float32",
                "--data.name", "train.jsonl", "--data.seq-len", "64", "--data.batch-size", "6", "--data.micro-batch-size", "1",
                "--val.data.name", "held_out.jsonl", "--val.data.seq-len", "64", "--val.data.batch-size", "6", "--val.interval", "1",
                "--optim.lr", "1e-3", "--scheduler.type", "cosine", "--scheduler.warmup-steps", "0", "--num-epochs", "2",
                "--max-steps", "None", "--ckpt", "--ckpt.interval", "1", "--log.plain", "--device", device, "--output-dir", out, *more]

    def run(self, *args, **more):
        command = self.command(*args, **more)
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\nended with {done.returncode}\n{done.stderr[-2000:]}")

    def steps(self, out):
        return steps(self.folder / out)

    def weights(self, out, step):
        data = (self.folder / out / f"checkpoints/step_{step}/trainable.safetensors").read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:8 + size])
        for tensor in sorted(set(header) - {"__metadata__"}):
            begin, end = header[tensor]["data_offsets"]
            yield from struct.unpack(f"<{(end - begin) // 4}f", data[8 + size + begin:8 + size + end])

    def alike(self, what, kind, one, other):
        a, b = self.steps(one), self.steps(other)
        off = {}
        same_steps = [row["step"] for row in a] == [row["step"] for row in b]
        for key in ["loss/mean", "optim/grad_norm", "val/loss"]:
            pairs = [(x[key], y[key]) for x, y in zip(a, b) if key in x]
            off[key] = max(abs(x - y) / abs(x) for x, y in pairs) if pairs else float("inf")
        last = a[-1]["step"]
        x, y = (list(self.weights(out, last)) for out in (one, other))
        off["weights"] = (sum((p - q) ** 2 for p, q in zip(x, y, strict=True)) / sum(p * p for p in x)) ** 0.5
        good = same_steps and all(value <= self.args.bound for value in off.values())
        self.say(good, f"{kind}: {what}, {len(a)} steps: " + ", ".join(f"{key} {value:.1e}" for key, value in off.items()))

    def say(self, good, text):
        print("ok  " if good else "FAIL", text, flush=True)
        if not good:
            self.failures.append(text)


def trains_alike(job, kind):
    ranks = job.args.ranks
    job.run(kind, f"{kind}-one", 1)
    ways = {"threads": dict()} | ({"processes": dict(processes=True)} if job.args.device == "cuda" else {})
    for way, more in ways.items():
        job.run(kind, f"{kind}-{way}", ranks, **more)
        job.alike(f"{ranks} ranks in {way} against one", kind, f"{kind}-one", f"{kind}-{way}")
    # The whole run, and then again from its middle with another number of ranks.
    for what, first, then in [("1 to R", 1, ranks), ("R to 1", ranks, 1)]:
        out = f"{kind}-{first}-{then}"
        job.run(kind, out, first)
        job.run(kind, out, then, more=["--ckpt.resume-step", "2"])
        job.alike(f"a checkpoint goes on, {what.replace('R', str(ranks))}", kind, f"{kind}-one", out)


def killed(job):
    command = job.command("lora", "killed", job.args.ranks, processes=True, more=["--num-epochs", "10000"])
    seconds, code, said = kill_a_rank(command, job.folder / "killed/checkpoints/step_2", job.folder)
    named = f"rank {job.args.ranks - 1}" in said
    job.say(code not in (0, None) and seconds < 30 and named, f"a killed rank: all ended after {seconds:.1f} s, named: {named}")
    job.run("lora", "killed", 1, more=["--num-epochs", "None", "--max-steps", "12", "--ckpt.resume-step", "-1"])
    job.say(len(job.steps("killed")) == 12, "its last checkpoint goes on")


def nobody_there(job):
    began = time.time()
    world = dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")
    command = job.command("lora", "nobody", 1, more=["--device", "cuda", "--dist-timeout-seconds", "8"])
    done = subprocess.run(command, cwd=job.folder, capture_output=True, text=True, env=os.environ | world, timeout=120)
    seconds = time.time() - began
    named = "127.0.0.1:9" in done.stderr and "rank" in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")] or [f"no error, code {done.returncode}"]
    job.say(done.returncode != 0 and named and seconds < 60, f"a master that isn't there: after {seconds:.1f} s {errors[0]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("embertune", type=lambda path: str(Path(path).resolve()))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bound", type=float, default=1e-5, help="largest relative difference (sums come in another order)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(args, folder)
        for kind in ["lora", "full"]:
            trains_alike(job, kind)
        if args.device == "cuda":
            killed(job)
            nobody_there(job)
    sys.exit(1 if job.failures else 0)


main()
