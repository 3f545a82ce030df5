"""--sanity_check=True finds what is wrong, and nothing where nothing is."""
import re

import pytest
import torch

from checkpoint import has_checkpoint
from conftest import SFT, TINY, chats, error_line, run
from extras import sanity
from model import GPT, GPTConfig, attend

CHECKS = ("the first loss", "parameters get a gradient", "dead", "earlier positions: none", "later positions: none",
          "overfitting")


@pytest.mark.parametrize("script", ["train_gpt2.py", "chat_sft.py"])
def test_a_model_that_learns_passes(shards, trained, tmp_path, script):
    flags = [*TINY, f"--data_dir={shards}", "--arch=llama", "--embed_norm=True", "--optimizer=muon"]
    checks = CHECKS
    if script == "chat_sft.py":
        flags = [*SFT, f"--init_from={trained}", f"--data={chats(tmp_path / 'chats.jsonl')}",
                 f"--chat_dir={tmp_path}/rows"]
        checks = CHECKS[1:]  # its first loss may be any
    output = run(script, *flags, f"--out_dir={tmp_path}/o", "--sanity_check=True")
    lines = [line for line in output.splitlines() if line.startswith(("ok  ", "PROBLEM"))]
    assert len(lines) == len(checks) and all(line.startswith("ok") for line in lines), lines
    assert all(words in line for words, line in zip(checks, lines))
    assert not has_checkpoint(tmp_path / "o")


def check(gpt, capsys, parameters=None, autocast=torch.autocast("cpu", enabled=False), steps=3, lr=1e-2):
    """Lines of the check that begin with PROBLEM, and its first and last loss."""
    x = torch.arange(16).view(2, 8)
    optimizer = torch.optim.AdamW(parameters or gpt.parameters(), lr=lr)
    with pytest.raises(SystemExit) as end:
        sanity.check(gpt, {"idx": x, "targets": x + 100}, optimizer, autocast, True, 1, steps)
    output = capsys.readouterr().out
    problems = [line for line in output.splitlines() if line.startswith("PROBLEM")]
    assert end.value.code == (1 if problems else 0)
    return problems, *map(float, re.search("its loss went from (.*) to (.*) in", output).groups())


def tiny_gpt(dead=0):
    """dead: units of the MLP that are."""
    gpt = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=32, max_seq_len=8, vocab_size=384))
    gpt.transformer.h[0].mlp.c_fc.bias.data[:dead] = -1e4
    return gpt


def test_what_keeps_a_model_from_learning_is_named(capsys):
    gpt = tiny_gpt()
    gpt.transformer.h[0].mlp.c_proj.weight.data.zero_()  # no gradient to the layer before, in the first step
    gpt.transformer.h[0].mlp.c_proj.weight.requires_grad_(False)
    problems, _, _ = check(gpt, capsys)
    assert "transformer.h.0.mlp.c_fc.weight: 0.0e+00" in problems[0]
    for dead, share in ((128, "100%"), (7, "5%"), (6, None)):  # of 128: 5.5 % and 4.7 %
        problems, _, _ = check(tiny_gpt(dead), capsys)
        assert any("more than 5 % of the units are dead" in line for line in problems) == bool(share)
        assert not share or any(f"mlp.c_fc.weight: {share}" in line for line in problems)
    gpt = tiny_gpt()
    gpt.transformer.ln_f.weight.data.fill_(torch.nan)
    problems, _, _ = check(gpt, capsys)
    assert any("transformer.wte.weight: nan" in line for line in problems)
    gpt = tiny_gpt()
    gpt.transformer.wte.weight.data.mul_(10)
    problems, _, _ = check(gpt, capsys)
    assert "the first loss is" in problems[0]
    for mask, words in ((torch.eye(8), "ignores all earlier positions: [0]"),
                        (torch.ones(8, 8), "sees later positions: [0]")):
        gpt = tiny_gpt()
        gpt.transformer.h[0].attn.attend = lambda q, k, v, _, dropout, mask=mask: attend(q, k, v, mask.bool(), dropout)
        problems, _, _ = check(gpt, capsys, steps=100)
        assert len(problems) == 1 and words in problems[0]  # it overfits all the same
    problems, _, _ = check(tiny_gpt(), capsys, lr=0)
    assert len(problems) == 1 and "PROBLEM overfitting one micro-batch" in problems[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_step_trains_on_the_weights_of_the_one_before(capsys, dtype):
    """One autocast around all of them would train on copies of the first weights."""
    gpt = tiny_gpt()
    gpt.transformer.wte.requires_grad_(False).weight.mul_(20)  # only what autocast casts can learn
    matrices = [p for p in gpt.transformer.h.parameters() if p.dim() == 2]
    autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    _, first, last = check(gpt, capsys, matrices, autocast, steps=100)
    assert last < 0.95 * first


def test_a_wide_model_and_one_with_matrices_in_bfloat16_have_no_problem(capsys):
    torch.manual_seed(2)  # of 16 tokens the mean loss is random by some percent
    gpt = GPT(GPTConfig(n_layer=1, n_head=8, n_embd=2048, max_seq_len=8, vocab_size=384, intermediate_size=64))
    gpt.requires_grad_(False).transformer.h.requires_grad_(True)
    problems, *_ = check(gpt, capsys, [*gpt.transformer.h.parameters()], lr=1e-4)
    assert not any("the first loss" in line for line in problems)
    gpt = tiny_gpt().requires_grad_(False)
    for module in gpt.modules():
        if isinstance(module, torch.nn.Linear):
            module.bfloat16()
    gpt.transformer.ln_f.requires_grad_(True)
    check(gpt, capsys, [*gpt.transformer.ln_f.parameters()], torch.autocast("cpu", torch.bfloat16))


def test_several_ranks_are_refused():
    line = error_line(sanity.check, tiny_gpt(), {}, None, None, True, 2)
    assert "--sanity_check=True: start it without torchrun" in line
