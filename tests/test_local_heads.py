"""Local heads and the induction head: what they look at on the initial weights, and that nothing else changes."""
import pytest
import torch
import torch.nn.functional as F

from conftest import LLAMA, SMALL, TINY, load, refused, run, same, tokens
from extras.local_heads import init_local_heads
from model import GPT, GPTConfig, attend


def normalized_gpt(local_heads, **settings):
    """A new model with both norms, and with local heads if asked for."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(**{**SMALL, **settings}, arch="llama", qk_norm=True, embed_norm=True))
    if local_heads:
        init_local_heads(gpt, None)
    return gpt


def look_at_attention(gpt, look):
    """Has look(weights) called in each layer of each forward pass, with what attends to what: (B, T, heads, T)."""
    def attend_and_look(q, k, v, mask, dropout):
        B, T, n_kv_head, _ = k.shape
        values = torch.eye(T)[None, :, None].expand(B, T, n_kv_head, T)  # so that the output is the weights
        look(attend(q, k, values, mask, dropout).unflatten(2, (-1, T)))
        return attend(q, k, v, mask, dropout)

    for block in gpt.transformer.h:
        block.attn.attend = attend_and_look


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("local_heads", [True, False])
def test_a_local_head_looks_as_far_back_as_its_number(n_kv_head, local_heads):
    """In the first layer, on random ids. Without local_heads no head prefers a distance."""
    gpt = normalized_gpt(local_heads, n_kv_head=n_kv_head)
    seen = []  # for each layer the mean attention weight on the key 0, 1, ..., 19 positions back: (20, heads)
    look_at_attention(gpt, lambda weights: seen.append(torch.stack(
        [weights[:, 20:].diagonal(20 - back, 1, 3).mean((0, 2)) for back in range(20)])))
    gpt(tokens(8))
    most, back = torch.stack(seen).max(1)  # (layers, heads)
    assert most.shape == (3, 4) and (most[0] > 0.2).all() == local_heads == (most > 0.2).any()
    assert not local_heads or (back[0] == torch.arange(1, 5)).all()


def test_local_heads_change_the_initial_weights_and_nothing_else():
    local, plain = normalized_gpt(True), normalized_gpt(False)
    changed = {name for (name, p), q in zip(local.named_parameters(), plain.parameters()) if not torch.equal(p, q)}
    assert changed == {"transformer.wte.weight", "lm_head.weight",
                       *(f"transformer.h.{i}.attn.{x}_proj.weight" for i in (0, 1) for x in "qkvo")}
    plain.load_state_dict(local.state_dict())
    assert torch.equal(local(tokens()), plain(tokens()))


@pytest.mark.parametrize("n_kv_head", [4, 1])
def test_an_induction_head_copies_what_followed_the_latest_tokens(n_kv_head):
    """
    16 ids in two random orders, and all of that again: in the second copy it looks at the id that followed the same
    two ids in the first one, and the model expects that id.
    """
    ratios = []  # of the weight on that id to the mean weight, for the first head of each layer
    gains = []  # by how much the loss is lower on the second copy than on the first, in nats
    for local_heads in (True, False):
        gpt = normalized_gpt(local_heads, n_layer=2, n_embd=256, n_kv_head=n_kv_head, max_seq_len=64)
        look_at_attention(gpt, lambda weights: ratios.append(
            (weights[:, 32:63, 0].diagonal(1, 1, 2).mean() / (1 / torch.arange(33, 64)).mean()).item()))
        idx = torch.stack([torch.cat((torch.randperm(16), torch.randperm(16))).repeat(2) for _ in range(8)])
        logits = gpt(idx)
        losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), idx[:, 1:].flatten(), reduction="none").view(8, 63)
        gains.append((losses[:, :31].mean() - losses[:, 32:].mean()).item())
    assert ratios[1] > 8 and all(ratio < 1.2 for ratio in ratios[:1] + ratios[2:]), ratios
    assert gains[0] > 0.4 and abs(gains[1]) < 0.02, gains


@pytest.mark.parametrize("n_embd, n_head, n_kv_head, n_layer",
                         [(8, 4, 4, 2), (48, 8, 8, 2), (64, 4, 1, 3), (16, 1, 1, 1)])
def test_any_width_and_number_of_heads_has_them(n_embd, n_head, n_kv_head, n_layer):
    """Heads of 2, 6 and 16, of which too few pairs are left for two tokens, one key head, and one layer."""
    gpt = normalized_gpt(True, n_embd=n_embd, n_head=n_head, n_kv_head=n_kv_head, n_layer=n_layer)
    assert gpt(tokens()).isfinite().all()


def test_only_new_models_have_them_and_only_with_both_norms(shards, trained, tmp_path):
    flags = ["train_gpt2.py", *TINY, f"--data_dir={shards}", "--local_heads=True", "--warmup_iters=0",
             "--max_iters=0"]
    assert "--local_heads=True: give it with --qk_norm=True and" in refused(*flags, *LLAMA, f"--out_dir={tmp_path}/a")
    assert "only the initial weights" in refused(*flags, f"--init_from={trained}", f"--out_dir={tmp_path}/a")
    flags += [*LLAMA, "--embed_norm=True", f"--out_dir={tmp_path}/b"]
    run(*flags)
    first = load(tmp_path / "b")
    run(*flags, "--init_from=resume")  # and not a second time
    run(*flags, f"--init_from={tmp_path}/b", f"--out_dir={tmp_path}/c")
    assert all(same(first["model"], load(tmp_path / name)["model"]) for name in "bc")
    assert "cannot change it" in refused("train_gpt2.py", "--init_from=resume", f"--out_dir={tmp_path}/b",
                                         "--local_heads=False")
