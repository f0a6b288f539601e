"""Do PEFT and vLLM themselves do with each adapter of tests/fixtures/adapters what tests/lint.rs expects of `lint`?

    python tools/parity/lint_check.py        (torch, transformers, peft; and what vllm_check.py needs, or PEFT alone is asked)

Every adapter of the table is loaded by PEFT into a model of its base (T: without a missing key or a mismatch, and the logits
move; M: with a warning of missing keys, or without effect; R: an exception) and by vLLM's loader (vllm_check.py). Exits with 1
where one says something else than the table.
"""

import json, logging, re, sys, warnings
from pathlib import Path

import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config, Qwen3Config

try:
    import vllm_check
except ImportError as missing:
    vllm_check = None
    print(f"vLLM isn't asked: {missing}")

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = ROOT / "tests/fixtures/adapters"
TABLE = re.findall(r'\("(\w+)", "(base\w*)", "([TMR]{4})"\)', (ROOT / "tests/lint.rs").read_text())
# What PEFT alone can't be asked of these few files.
NOT_ASKED = {
    "corda": "it wants the activations that it began with",
    "loftq": "it wants a quantiser",
    "bdlora": "made by hand: it wants other blocks",
    "layer_replication": "transformers has no second layer to run",
    "tokens_added": "made by hand: it wants a base with a larger vocabulary",
}
# Both tell of much else.
logging.disable(logging.WARNING)


def model_of(base, config):
    torch.manual_seed(0)
    kind = Qwen2Config if base["model_type"] == "qwen2" else Qwen3Config
    head = AutoModelForSequenceClassification if config.get("task_type") == "SEQ_CLS" else AutoModelForCausalLM
    return head.from_config(kind(**base), dtype=torch.float32).eval()


def peft_says(folder, base):
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
    except ValueError:
        config = {}
    ids = torch.tensor([[1, 2, 3]]).repeat(1, 4)  # what calls the adapter of aLoRA is among them
    model = model_of(base, config)
    before = model(ids).logits
    try:
        with warnings.catch_warnings(record=True) as told, torch.no_grad():
            warnings.simplefilter("always")
            adapted = PeftModel.from_pretrained(model, folder).eval()
            after = adapted(ids).logits
    except Exception as error:
        return "R", f"{type(error).__name__}: {error}"
    lost = [str(w.message) for w in told if "missing adapter keys" in str(w.message)]
    if lost or torch.equal(before, after):
        return "M", lost[0] if lost else "without effect"
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        stored = list(file.keys())
    strange = [key for key in stored if not has_place(key, adapted.state_dict())]
    return ("M", f"no place for {strange[0]}") if strange else ("T", f"{len(stored)} tensors")


def has_place(key, held):
    """Whether PEFT holds the tensor; there its name has the adapter's in it."""
    plain = lambda k: k.replace(".default", "").replace(".modules_to_save", "").removesuffix(".weight")
    return plain(key) in {plain(h) for h in held}


def vllm_says(folder, base):
    try:
        text, taken = vllm_check.check(folder, base, 512)
        return "T" if taken else "M", text
    except Exception as error:
        return "R", f"{type(error).__name__}: {error}"


wrong = 0
assert len(TABLE) > 50, TABLE
for name, base, letters in TABLE:
    config = json.loads((ADAPTERS / base / "config.json").read_text())
    why = NOT_ASKED.get(name)
    says = [] if why else [("peft", letters[0], *peft_says(ADAPTERS / name, config))]
    if why:
        print(f"     {name:<24} peft isn't asked: {why}")
    if vllm_check:
        says.append(("vllm", letters[1], *vllm_says(ADAPTERS / name, config)))
    for server, wanted, got, why in says:
        same = wanted == got
        wrong += not same
        print(f"{'ok  ' if same else 'FAIL'} {name:<24} {server}: {got}{'' if same else f', the table has {wanted}'}  {why[:150]}")
print(f"{len(TABLE)} adapters, {wrong} differences")
sys.exit(wrong > 0)
