# A GPT that learns to write Python in five minutes on two CPU cores: 1.4M parameters, 2.0 MB of the standard library.
# The best of several sizes and of both vocabularies in that time: docs/benchmarks.md.
#   python prepare_data.py --dataset=python && python train_gpt2.py config/quickstart.py
out_dir = "out-quickstart"
data_dir = "data/python"
n_layer = 6
n_head = 4
n_embd = 128
max_seq_len = 256
batch_size = 8
gradient_accumulation_steps = 1
max_iters = 1000
eval_interval = 250
eval_iters = 32
sample_tokens = 400

# the recipe, as in speedrun.py
arch = "llama"
qk_norm = True
embed_norm = True
local_heads = True
optimizer = "muon"
muon_lr = 0.03
learning_rate = 0.01
embedding_lr = 0.2
head_lr = 0.005
weight_decay = 0.0
grad_clip = 0.0
warmup_iters = 0
lr_schedule = "wsd"
wsd_decay_frac = 1.0
min_lr = 0.0
