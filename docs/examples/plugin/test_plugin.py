"""All it takes to prove a plug-in: `pip install . && pytest`."""

from penstock_example import Tally, Vocabulary, VocabularyHandler

from penstock.testing import HandlerConformance, StageConformance


class TestVocabulary(HandlerConformance):
    def make_handler(self):
        return VocabularyHandler()

    def values(self):
        return [Vocabulary(["a", "b"]), Vocabulary()]

    def change(self, value):
        value.words.append("later")


class TestTally(StageConformance):
    def pipelines(self, saving, restoring):
        return saving.insert_after("device_to_host", Tally(), called="tally"), restoring
