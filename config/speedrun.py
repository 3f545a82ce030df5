# The fastest recipe we have found: llama blocks, Muon, and a learning rate for each kind of parameter that falls
# linearly to zero. docs/benchmarks.md shows what each choice gains in small models. optim.py scales muon_lr and
# head_lr with the model's size; the other rates suit all sizes that we tried (docs/lab_notes.md). No run was longer
# than 4,000 steps.
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
