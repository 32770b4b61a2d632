"""Few-shot prompting (Brown et al., 2020, https://arxiv.org/abs/2005.14165): a task from examples in the prompt alone.

    python examples/convert_smollm2_gguf.py --output smollm2
    python examples/few_shot_prompting.py --model smollm2 --shots 8

The task: which part of Python's standard library is a docstring from (`hf_ext.data.docstrings`, nothing to download)?
No weight is trained. A text gets the topic whose words are likeliest after the prompt, once without examples and once
with `--shots` of them. What a model says whatever the text is taken out: its likelihoods after a text without content
are subtracted (contextual calibration, Zhao et al., 2021, https://arxiv.org/abs/2102.09690); `--raw` leaves them in.

What all texts share, the instruction and the examples, is computed once; its keys and values are the cache from which
every text starts. A text is computed once too, and all topics follow it as rows of one batch.
"""

import argparse
import copy
import random
from collections import Counter

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

import hf_ext
from hf_ext.data.docstrings import TOPICS, load_docstrings


def question(text: str, words: int) -> str:
    """A text as the prompt shows it, up to where the topic follows; long ones are cut."""
    return f"Docstring: {' '.join(text.split()[:words])}\nTopic:"


class LikelihoodClassifier:
    """Chooses among words by their likelihood after a prompt.

    Args:
        shared: what every prompt starts with.
        labels: the words to choose among.

    Shapes: T tokens of a text, L labels, S tokens of the longest label, V vocabulary.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, shared: str, labels: list[str]
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        words = [self.ids(f" {label}")[0] for label in labels]
        self.labels = torch.nn.utils.rnn.pad_sequence(words, batch_first=True)  # (L, S)
        self.real = torch.arange(self.labels.shape[1]) < torch.tensor([len(w) for w in words])[:, None]  # (L, S)
        self.real = self.real.to(model.device)
        self.cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(tokenizer(shared, return_tensors="pt").input_ids.to(model.device), past_key_values=self.cache)

    def ids(self, text: str) -> Tensor:
        """(1, T); the marks of a beginning belong to the shared prompt."""
        return self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.to(self.model.device)

    @torch.no_grad()
    def scores(self, text: str) -> Tensor:
        """Log likelihood of every label after the shared prompt and this text. (L,)"""
        cache = copy.deepcopy(self.cache)
        first = self.model(self.ids(text), past_key_values=cache).logits[:, -1:]  # (1, 1, V)
        logits = [first.expand(len(self.labels), -1, -1)]
        if self.labels.shape[1] > 1:  # what pads a shorter label comes after it, where it sees but is not seen
            cache.batch_repeat_interleave(len(self.labels))
            logits.append(self.model(self.labels[:, :-1], past_key_values=cache).logits)  # (L, S - 1, V)
        likelihood = torch.cat(logits, 1).float().log_softmax(-1).gather(-1, self.labels[..., None])[..., 0]  # (L, S)
        return likelihood.masked_fill(~self.real, 0).sum(-1)


def main(argv: list[str] | None = None) -> dict:
    """Measure, print, and return the shares of right answers: `majority`, `zero_shot`, `few_shot`."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="folder or Hub id of a causal decoder")
    parser.add_argument("--topics", nargs="+", default=["datetime", "email", "unittest", "xml"], choices=sorted(TOPICS))
    parser.add_argument("--shots", type=int, default=8, help="examples in the prompt, of each topic in turn")
    parser.add_argument("--texts", type=int, default=100, help="texts to test on")
    parser.add_argument("--words", type=int, default=30, help="words that are kept of a text")
    parser.add_argument("--raw", action="store_true", help="take likelihoods as they are, without calibration")
    parser.add_argument("--seed", type=int, default=0, help="which texts, and which examples")
    args = parser.parse_args(argv)

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    with hf_ext.takeover():
        model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    data = load_docstrings(args.seed, topics={name: TOPICS[name] for name in args.topics})
    topics = data["test"].features["label"].names
    test = [(row["text"], topics[row["label"]]) for row in data["test"]][: args.texts]
    by_topic = {name: [row["text"] for row in data["train"] if topics[row["label"]] == name] for name in topics}
    shots = [(by_topic[name][i], name) for i in range(args.shots) for name in topics][: args.shots]
    random.Random(args.seed).shuffle(shots)

    majority = Counter(name for _, name in test).most_common(1)[0][1] / len(test)
    print(f"{type(model).__name__}, {len(test)} docstrings of {', '.join(topics)}")
    print(f"always the most frequent topic: {majority:.1%}")
    result = {"majority": majority}
    instruction = f"The topic of each docstring is one of: {', '.join(topics)}.\n\n"
    for kind, examples in (("zero_shot", []), ("few_shot", shots)):
        shared = instruction + "".join(f"{question(text, args.words)} {name}\n\n" for text, name in examples)
        classifier = LikelihoodClassifier(model, tokenizer, shared, topics)
        habit = 0 if args.raw else classifier.scores(question("N/A", args.words))
        answers = [topics[int((classifier.scores(question(text, args.words)) - habit).argmax())] for text, _ in test]
        result[kind] = sum(answer == name for answer, (_, name) in zip(answers, test)) / len(test)
        tokens = classifier.cache.get_seq_length()
        print(f"{len(examples)} examples ({tokens} shared tokens): {result[kind]:.1%} right")
    return result


if __name__ == "__main__":
    main()
