# The recipe that gets to a loss soonest: llama blocks, Muon, a rate for each kind of parameter that falls to zero over
# the whole run. docs/benchmarks.md has what each choice gained, in small models. The best muon_lr falls with the depth
# and the best head_lr with the width, which optim.py does; the best of the other rates stays (docs/lab_notes.md).
# Beyond 2,000 steps nothing was measured.
#   python train_gpt2.py config/speedrun.py
arch = "llama"
qk_norm = True
embed_norm = True
local_heads = True
optimizer = "muon"
muon_lr = 0.03
learning_rate = 0.01
embedding_lr = 0.2
head_lr = 0.004
beta1 = 0.6
beta2 = 0.98
weight_decay = 0.0
grad_clip = 0.0
warmup_iters = 0
lr_schedule = "wsd"
wsd_decay_frac = 1.0
min_lr = 0.0
