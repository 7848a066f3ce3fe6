"""From judged groups to better weights: advantage, loss, KL, log-probs, batches, optimizer, and the learner that joins them."""
