# Teaches the quick start's GPT to say what a function does, by its name and arguments. Two minutes on two CPU cores.
#   python chat_sft.py config/quickstart_chat.py
out_dir = "out-quickstart-chat"
init_from = "out-quickstart/ckpt.pt"
data = "data/python/chat.jsonl"
batch_size = 8
gradient_accumulation_steps = 1
learning_rate = 6e-3
max_iters = 483  # two epochs
eval_interval = 200
eval_iters = 16
