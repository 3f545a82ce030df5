# A GPT that learns to write Python in minutes on two CPU cores: 3.4M parameters, 1.0 MB of the standard library.
#   python prepare_data.py --dataset=python && python train_gpt2.py config/quickstart.py
import os
import runpy

# the recipe of speedrun.py: half of these steps end lower than 700 of AdamW did
globals().update(runpy.run_path(os.path.join(os.path.dirname(__file__), "speedrun.py")))

out_dir = "out-quickstart"
data_dir = "data/python"
n_layer = 4
n_head = 4
n_embd = 256
max_seq_len = 256
batch_size = 8
gradient_accumulation_steps = 1
max_iters = 500
eval_interval = 125
eval_iters = 32
sample_tokens = 400
