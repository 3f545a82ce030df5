"""--sanity_check=True finds what is wrong, and nothing where nothing is."""
import re

import pytest
import torch

from checkpoint import has_checkpoint
from conftest import TINY, chats, run
from extras import sanity
from model import GPT, GPTConfig

ARGS = [*TINY, "--sanity_check=True"]
CHECKS = ("the first loss", "parameters get a gradient", "dead", "overfitting")


@pytest.mark.parametrize("extra", [[], ["--arch=llama", "--embed_norm=True", "--optimizer=muon"]],
                         ids=["gpt2", "llama_muon"])
def test_a_model_that_learns_passes(shards, tmp_path, extra):
    output = run("train_gpt2.py", *ARGS, *extra, f"--data_dir={shards}", f"--out_dir={tmp_path}")
    lines = [line for line in output.splitlines() if line.startswith(("ok  ", "PROBLEM"))]
    assert len(lines) == len(CHECKS) and all(line.startswith("ok") for line in lines), lines
    assert all(words in line for words, line in zip(CHECKS, lines))
    assert not has_checkpoint(tmp_path)


def test_chat_tuning_is_checked_too(trained, tmp_path):
    output = run("chat_sft.py", f"--init_from={trained}", f"--data={chats(tmp_path / 'chats.jsonl')}",
                 f"--chat_dir={tmp_path}/rows", f"--out_dir={tmp_path}/o", "--sanity_check=True", "--device=cpu",
                 "--dtype=float32", "--compile=False", "--learning_rate=3e-3")
    assert output.count("ok    ") == len(CHECKS) - 1 and "PROBLEM" not in output  # its first loss may be any


def test_a_learning_rate_of_zero_is_found(shards, tmp_path):
    output = run("train_gpt2.py", *ARGS, f"--data_dir={shards}", f"--out_dir={tmp_path}", "--learning_rate=0",
                 "--min_lr=0", code=1)
    assert "PROBLEM overfitting one micro-batch" in output


def check(gpt, capsys, parameters=None, autocast=torch.autocast("cpu", enabled=False), steps=3):
    """Lines of the check that begin with PROBLEM, and its first and last loss."""
    x = torch.arange(16).view(2, 8)
    optimizer = torch.optim.AdamW(parameters or gpt.parameters(), lr=1e-2)
    with pytest.raises(SystemExit) as end:
        sanity.check(gpt, {"idx": x, "targets": x + 100}, optimizer, autocast, True, 1, steps)
    output = capsys.readouterr().out
    problems = [line for line in output.splitlines() if line.startswith("PROBLEM")]
    assert end.value.code == (1 if problems else 0)
    return problems, *map(float, re.search("its loss went from (.*) to (.*) in", output).groups())


def small_gpt(n_embd=32):
    return GPT(GPTConfig(n_layer=1, n_head=1, n_embd=n_embd, max_seq_len=8, vocab_size=384))


def test_what_keeps_a_model_from_learning_is_named(capsys):
    gpt = small_gpt()
    gpt.transformer.h[0].mlp.c_proj.weight.data.zero_()  # no gradient to the layer before, in the first step
    gpt.transformer.h[0].mlp.c_proj.weight.requires_grad_(False)
    problems, _, _ = check(gpt, capsys)
    assert "transformer.h.0.mlp.c_fc.weight: 0.0e+00" in problems[0]
    gpt = small_gpt()
    gpt.transformer.h[0].mlp.c_fc.bias.data.fill_(-1e4)
    problems, _, _ = check(gpt, capsys)
    assert any("more than 5 % of the units are dead; transformer.h.0.mlp.c_fc.weight: 100%" in line
               for line in problems)
    for n_dead in (6, 7):  # of 128: 4.7 % and 5.5 %
        gpt = small_gpt()
        gpt.transformer.h[0].mlp.c_fc.bias.data[:n_dead] = -1e4
        problems, _, _ = check(gpt, capsys)
        assert any("mlp.c_fc.weight: 5%" in line for line in problems) == (n_dead == 7)
    gpt = small_gpt()
    gpt.transformer.ln_f.weight.data.fill_(torch.nan)
    problems, _, _ = check(gpt, capsys)
    assert any("transformer.wte.weight: nan" in line for line in problems)
    with torch.no_grad():
        gpt = small_gpt()
        gpt.transformer.wte.weight.mul_(100)
    problems, _, _ = check(gpt, capsys)
    assert "the first loss is" in problems[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_step_trains_on_the_weights_of_the_one_before(capsys, dtype):
    """One autocast around all of them would train on copies of the first weights."""
    gpt = small_gpt()
    gpt.transformer.wte.requires_grad_(False).weight.mul_(20)  # only what autocast casts can learn
    matrices = [p for p in gpt.transformer.h.parameters() if p.dim() == 2]
    autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    _, first, last = check(gpt, capsys, matrices, autocast, steps=100)
    assert last < 0.95 * first


def test_several_ranks_are_refused(capsys):
    with pytest.raises(SystemExit):
        sanity.check(small_gpt(), {}, None, None, True, 2)
    assert "error: --sanity_check=True: start it without torchrun" in capsys.readouterr().err
