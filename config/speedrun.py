# The recipe that gets to a loss soonest: llama blocks, Muon, a rate for each kind of parameter, constant and then
# linear to zero. docs/benchmarks.md has what each choice gained, in small models and short runs: the rates are from 90
# to 200 steps. Those of 800 and more have --muon_lr=0.03 --wsd_decay_frac=1.0; over 1,500 nothing was measured.
#   python train_gpt2.py config/speedrun.py
arch = "llama"
qk_norm = True
embed_norm = True
optimizer = "muon"
muon_lr = 0.04
learning_rate = 0.01
embedding_lr = 0.2
head_lr = 0.005
weight_decay = 0.0
grad_clip = 0.0
warmup_iters = 0
lr_schedule = "wsd"
wsd_decay_frac = 0.6
min_lr = 0.0
