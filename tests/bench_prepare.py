"""
Data preparation beside nanoGPT's and litgpt's, which both tokenize OpenWebText: here they get the same local files
instead, and 30 % of them for validation, as nanoGPT needs 1,024 documents there. Prints the median seconds of each,
start to end, and GPT-2 tokens per second. Run by hand:

    python tests/bench_prepare.py --files='texts/*.parquet' --nanogpt=../nanoGPT
    litgpt/bin/pip install datasets litdata==0.2.59        # besides what tests/bench_peers.py asks for
    python tests/bench_prepare.py --files='texts/*.parquet' --litgpt=litgpt/bin/python --tokenizer=my-model

--tokenizer: a folder with GPT-2's tokenizer.json, such as export_hf.py writes; litgpt does not use tiktoken.
"""
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from configurator import Positive, configure  # noqa: E402

LOCAL_FILES = """
import datasets, glob, runpy, sys
load, split = datasets.load_dataset, datasets.Dataset.train_test_split
datasets.load_dataset = lambda *_, **__: load("parquet", data_files=sorted(glob.glob(sys.argv[1])))
datasets.Dataset.train_test_split = lambda data, **kwargs: split(data, **{**kwargs, "test_size": 0.3})
"""
NANOGPT = LOCAL_FILES + "runpy.run_path('prepare.py', run_name='__main__')"
LITGPT = LOCAL_FILES + """
import functools, litdata
litdata.optimize = functools.partial(litdata.optimize, start_method="fork")  # what litgpt hands it cannot be pickled
from litgpt import Tokenizer
from litgpt.data import OpenWebText
data = OpenWebText("out")
data.connect(Tokenizer(sys.argv[2]))
data.prepare_data()
"""

if __name__ == "__main__":
    files: str = ""  # parquet files with the column text, as a glob
    nanogpt: str | None = None  # folder of a checkout
    litgpt: str | None = None  # a python with litgpt
    tokenizer: str = ""  # litgpt: folder with GPT-2's tokenizer.json
    rounds: Positive = 3
    configure(globals())
    files = str(Path(files).resolve())
    jobs = {"here": [sys.executable, ROOT / "prepare_data.py", f"--files={files}", "--data_dir=shards"]}
    if nanogpt:
        jobs["nanoGPT"] = [sys.executable, "-c", NANOGPT, files]
    if litgpt:
        jobs["litgpt"] = [litgpt, "-c", LITGPT, files, Path(tokenizer).resolve()]
    seconds = defaultdict(list)
    for _ in range(rounds):
        for name, command in jobs.items():
            with tempfile.TemporaryDirectory() as folder:
                if name == "nanoGPT":
                    shutil.copy(Path(nanogpt, "data/openwebtext/prepare.py"), folder)
                start = time.perf_counter()
                subprocess.run(command, check=True, cwd=folder, env={**os.environ, "HF_HOME": f"{folder}/cache"},
                               stdout=sys.stderr)
                seconds[name].append(time.perf_counter() - start)
                if name == "here":
                    tokens = json.loads(Path(folder, "shards/meta.json").read_text())["tokens"]
    for name, values in seconds.items():
        s = statistics.median(values)
        print(f"{name:10} {s:6.1f} s {tokens / s:12,.0f} tokens/s")
