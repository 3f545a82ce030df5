# Teaches the quick start's GPT to answer: what does this function do? A minute or two on two CPU cores.
#   python chat_sft.py config/quickstart_chat.py
out_dir = "out-quickstart-chat"
init_from = "out-quickstart/ckpt.pt"
data = "data/python/chat.jsonl"
batch_size = 8
gradient_accumulation_steps = 1
learning_rate = 3e-3
eval_interval = 130
eval_iters = 16
