# Teaches the quick start's GPT to say what a function does, by its name and arguments, to add two numbers and to count
# a letter in a word. Two minutes on two CPU cores. Then ask it 200 sums and 200 words that it has not seen:
#   python chat_sft.py config/quickstart_chat.py
#   python evaluate.py --checkpoint=out-quickstart-chat --tasks=sums,letters --task_dir=data/python/tasks
out_dir = "out-quickstart-chat"
init_from = "auto:out-quickstart/ckpt.pt"  # the same command resumes after an interruption
data = "data/python/chat.jsonl"
batch_size = 8
gradient_accumulation_steps = 1
learning_rate = 6e-3
epochs = 0.704  # 483 steps
eval_interval = 200
eval_iters = 16
