"""What the library's pipelines do not know of our classes."""

from transformers import AutomaticSpeechRecognitionPipeline, PreTrainedModel


class SpeechRecognitionPipeline(AutomaticSpeechRecognitionPipeline):
    """The library's pipeline, which knows Whisper, and with it timestamps and long clips, by its official model type
    only. With any other model it is the library's."""

    def __init__(self, model: PreTrainedModel, *args: object, **kwargs: object) -> None:
        self.is_whisper = getattr(model.config, "official_model_type", None) == "whisper"
        super().__init__(model, *args, **kwargs)

    @property
    def type(self) -> str:
        """How the model is spoken to."""
        return "seq2seq_whisper" if self.is_whisper else self._type

    @type.setter
    def type(self, value: str) -> None:
        self._type = value
