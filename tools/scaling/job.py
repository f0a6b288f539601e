"""What the scripts here do with a run: its losses, and a rank of it killed."""

import json, os, signal, subprocess, tempfile, time


def devices(device, ranks):
    """`cuda:0,1`: the first of them, a thread each."""
    return f"{device}:" + ",".join(map(str, range(ranks)))


def steps(folder):
    """The rows of metrics.jsonl that are steps, not validation alone."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss/mean" in row]


def kill_a_rank(command, checkpoint, cwd=None):
    """Starts `embertune launch`, kills the last rank once the checkpoint stands; seconds that the others lived, code, what was said."""
    with tempfile.TemporaryFile("w+") as said:
        launcher = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=said)
        while not (checkpoint / "STABLE").exists() and launcher.poll() is None:
            time.sleep(0.05)
        ranks = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        began = time.time()
        try:
            code = launcher.wait(timeout=120)
        except subprocess.TimeoutExpired:
            launcher.kill()
            code = None
        seconds = time.time() - began
        said.seek(0)
        return seconds, code, said.read()
