# A GPT that learns to write Python in five minutes on two CPU cores: 1.4M parameters, 2.0 MB of the standard library.
#   python prepare_data.py --dataset=python && python train_gpt2.py config/quickstart.py
from config.speedrun import *  # the recipe

out_dir = "out-quickstart"
init_from = "auto"  # the same command resumes after an interruption
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
