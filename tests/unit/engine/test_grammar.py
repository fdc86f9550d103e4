"""Grammars in the engine, with the real library: matchers, masks, and requests that keep to them wherever they run."""

from __future__ import annotations

import re

import numpy as np
import pytest

from engine.grammar.compiling import GrammarWorkers
from engine.grammar.matching import GrammarMatching
from engine.messages import FinishReason, RunMode
from engine.sampling import SamplingRow, sample
from kernels import jit
from rpc.errors import BatonError, ErrorCode
from rpc.grammar import GrammarKind, GrammarSpec
from rpc.grammar_compiler import GrammarCompiler
from rpc.vocabulary import Vocabulary
from tests.unit.engine.real_engine import RealEngine, pair, run_until, serve
from tests.unit.engine.tiny_models import tiny_model

EOS = 256
VOCAB = 260  # beyond the tokenizer's 257
BYTES = Vocabulary((*(bytes([i]) for i in range(256)), b""), frozenset({EOS}))
REGEX = GrammarSpec(GrammarKind.REGEX, "[a-c]{2,6}(x|yy)")
PROMPT = [5, 9, 2, 14, 33, 8, 21]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(BYTES, vocab_size=VOCAB, stop_token_ids=(EOS,), cache_bytes=1 << 20)


def matching(compiler: GrammarCompiler, spec: GrammarSpec = REGEX, outputs: bytes = b"") -> GrammarMatching:
    found = GrammarMatching(compiler)
    assert found.begin(compiler.compile(spec), list(outputs)) is None
    return found


def allowed(found: GrammarMatching) -> set[int]:
    mask = found.mask
    assert mask is not None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[VOCAB:].any() or len(bits) == VOCAB
    return set(np.flatnonzero(bits[:VOCAB]).tolist())


def test_mask_when_tokens_are_committed_then_follows_the_grammar_to_its_end(compiler: GrammarCompiler) -> None:
    found = matching(compiler)
    assert allowed(found) == set(b"abc")
    for token in b"ab":
        assert found.commit(token) is None
    assert allowed(found) == set(b"abcxy")
    for token in b"yy":
        assert found.commit(token) is None
    assert allowed(found) == {EOS} and not found.terminated
    assert found.commit(EOS) is None
    assert allowed(found) == {EOS} and found.terminated


def test_commit_when_the_grammar_rejects_the_token_then_608_and_nothing_has_changed(compiler: GrammarCompiler) -> None:
    found = matching(compiler, outputs=b"a")
    before = allowed(found)
    for token in (ord("x"), EOS, 257, VOCAB - 1):
        error = found.commit(token)
        assert error is not None and error.code is ErrorCode.GRAMMAR_PARSER_REJECTED_TOKEN
        assert error.metadata == {"token_id": str(token), "tokens": "1"}
    assert allowed(found) == before
    assert found.commit(ord("b")) is None


def test_commit_when_the_grammar_is_over_then_609_for_all_but_an_end_of_sequence(compiler: GrammarCompiler) -> None:
    found = matching(compiler, outputs=b"aax")
    assert found.commit(EOS) is None
    assert found.commit(EOS) is None
    error = found.commit(ord("a"))
    assert error is not None and error.code is ErrorCode.GRAMMAR_NON_EOS_AFTER_TERMINAL


def test_begin_when_tokens_are_there_already_then_the_state_is_that_of_one_that_saw_them_come(
    compiler: GrammarCompiler,
) -> None:
    grown = matching(compiler)
    for count, token in enumerate(b"abccx", 1):
        assert grown.commit(token) is None
        assert allowed(matching(compiler, outputs=b"abccx"[:count])) == allowed(grown)
    error = GrammarMatching(compiler).begin(compiler.compile(REGEX), list(b"abz"))
    assert error is not None and error.code is ErrorCode.GRAMMAR_PARSER_REJECTED_TOKEN


def test_fill_when_nothing_was_committed_then_the_mask_is_not_made_again(compiler: GrammarCompiler) -> None:
    found = matching(compiler)
    mask = found.mask
    assert mask is not None
    mask[:] = 7  # a second filling would write over it
    found.fill()
    assert (found.mask == 7).all()
    assert found.commit(ord("a")) is None
    assert allowed(found) == set(b"abc")


def test_begin_when_the_grammar_is_of_a_larger_vocabulary_then_610(compiler: GrammarCompiler) -> None:
    larger = GrammarCompiler(BYTES, vocab_size=VOCAB + 64, stop_token_ids=(EOS,), cache_bytes=1 << 20)
    error = GrammarMatching(compiler).begin(larger.compile(REGEX), [])
    assert error is not None and error.code is ErrorCode.GRAMMAR_BITMASK_BUFFER_TOO_SMALL


def test_mask_when_the_matcher_fails_then_only_an_end_is_allowed_and_nothing_is_taken(
    compiler: GrammarCompiler,
) -> None:
    found = matching(compiler)
    found._matcher = object()  # has none of a matcher's methods
    assert allowed(found) == {EOS}
    for token in (EOS, ord("a")):
        error = found.commit(token)
        assert error is not None and error.code is ErrorCode.GRAMMAR_VERIFY_EXCEPTION


def test_mask_when_every_token_is_allowed_then_there_is_none() -> None:
    letters = Vocabulary((b"a", b"b"), frozenset())
    small = GrammarCompiler(letters, vocab_size=2, stop_token_ids=(), cache_bytes=1 << 20)
    found = GrammarMatching(small)
    assert found.begin(small.compile(GrammarSpec(GrammarKind.EBNF, "root ::= [ab] root")), []) is None
    assert found.mask is None


def test_special_tokens_when_their_text_would_fit_then_are_not_allowed() -> None:
    vocabulary = Vocabulary((b"<", b"s", b">", b""), frozenset({3}))  # the last one is spelled <s>
    compiler = GrammarCompiler(vocabulary, vocab_size=4, stop_token_ids=(3,), cache_bytes=1 << 20)
    found = GrammarMatching(compiler)
    assert found.begin(compiler.compile(GrammarSpec(GrammarKind.REGEX, "<s>")), []) is None
    assert found.commit(3) is not None
    assert [found.commit(token) for token in (0, 1, 2, 3)] == [None] * 4


@pytest.mark.parametrize(
    ("vocab_size", "stop", "code"),
    [(256, (), "GRAMMAR_VOCAB_EXCEEDS_MODEL_VOCAB"), (257, (257,), "GRAMMAR_EOS_OUT_OF_VOCAB")],
)
def test_compiler_when_the_vocabulary_does_not_fit_then_says_how(
    vocab_size: int, stop: tuple[int, ...], code: str
) -> None:
    with pytest.raises(BatonError) as caught:
        GrammarCompiler(BYTES, vocab_size=vocab_size, stop_token_ids=stop, cache_bytes=1 << 20)
    assert caught.value.code is ErrorCode[code]


def test_sample_when_a_row_has_a_grammar_then_draws_from_what_it_allows_and_reports_raw_logprobs(
    compiler: GrammarCompiler,
) -> None:
    import torch

    from engine.messages import SamplingParams

    logits = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(3))
    found = matching(compiler, outputs=b"ab")
    rows = [
        SamplingRow(SamplingParams(max_tokens=9, seed=i, temperature=i % 2, logprobs=1), 2, [], [97, 98], [EOS], found)
        for i in range(60)
    ]
    results = sample(logits, rows)
    tokens = [result.token_id for result in results]
    assert set(tokens) <= set(b"abcxy") and len(set(tokens)) > 3
    masked = torch.full((60, VOCAB), -torch.inf)
    masked[:, list(b"abcxy")] = logits[:, list(b"abcxy")]
    assert tokens[::2] == masked[::2].argmax(dim=1).tolist()
    raw = torch.log_softmax(logits.double(), dim=1)
    for i, result in enumerate(results):
        assert result.logprob is not None and result.token_id is not None
        assert result.logprob.logprob == pytest.approx(raw[i, result.token_id].item())
        assert result.top_logprobs[0].token_id == logits[i].argmax().item()


def test_sample_when_min_tokens_and_a_finished_grammar_leave_nothing_then_605_names_both(
    compiler: GrammarCompiler,
) -> None:
    import torch

    from engine.messages import SamplingParams

    row = SamplingRow(SamplingParams(max_tokens=9, min_tokens=5), 3, [], [], [EOS], matching(compiler, outputs=b"abx"))
    [result] = sample(torch.zeros(1, VOCAB), [row])
    assert result.failure is not None and result.failure.code is ErrorCode.INVALID_PARAMS
    assert "grammar" in result.failure.message and "min_tokens" in result.failure.message


def test_workers_when_a_grammar_does_not_compile_then_hand_over_its_error_and_go_on(compiler: GrammarCompiler) -> None:
    woken: list[int] = []
    workers = GrammarWorkers(compiler, lambda: woken.append(1))
    workers.submit("bad", GrammarSpec(GrammarKind.REGEX, "(a"))
    workers.submit("good", REGEX)
    workers._threads.shutdown(wait=True)
    found = dict(workers.take())
    assert isinstance(found["bad"], BatonError) and found["bad"].code is ErrorCode.ERROR_GENERATE_CONFIG_FORMAT
    assert found["bad"].metadata["position"] == "3"
    assert not isinstance(found["good"], BatonError)
    assert len(woken) == 2 and workers.take() == []


# -- whole engines -------------------------------------------------------------------------------------------------


def text_of(engine: RealEngine, tokens: list[int]) -> str:
    pieces = Vocabulary.load(tiny_model("llama")).pieces
    return b"".join(pieces[token] for token in tokens).decode()


def test_a_request_with_a_grammar_when_served_anywhere_then_has_the_same_tokens_and_keeps_to_it() -> None:
    """Colocated, disaggregated, taken over after some tokens, and computed again after a preemption."""
    options = {"grammar": REGEX, "ignore_eos": False, "max_tokens": 20, "temperature": 0.9, "seed": 11}
    free = {"grammars": True, "enable_prefix_caching": False}
    with pair(free, {**free, "num_kv_blocks": 8}) as (p, d):
        d.add("alone", PROMPT, **options)
        d.run()
        tokens = d.tokens("alone")
        assert re.fullmatch(REGEX.text, text_of(d, tokens)), text_of(d, tokens)
        assert d.last("alone").finish_reason is FinishReason.STOP
        assert d.last("alone").stop_token_id == tokens[-1]

        assert serve(p, d, "pd#0.00000001", PROMPT, **options) == tokens

        for kept in range(1, len(tokens)):
            d.add(f"after {kept}", PROMPT, outputs=tokens[:kept], **options)
            d.run()
            assert tokens[:kept] + d.tokens(f"after {kept}") == tokens

        d.add("preempted", PROMPT, **options)
        run_until([d], lambda: "preempted" in d.outputs)
        request = d.core.scheduler.open["preempted"]
        d.core.scheduler.batcher.preempt(request)
        d.run()
        assert d.tokens("preempted") == tokens and d.last("preempted").preemptions == 1
        assert d.clean() and p.clean()


def test_a_first_token_that_the_grammar_rejects_when_it_arrives_with_the_load_then_is_never_given_out() -> None:
    """The prefill server was not told of the grammar, and draws what it likes."""
    with pair({"grammars": True}, {"grammars": True}) as (p, d):
        key = "r#0.00000001"
        grammar = GrammarSpec(GrammarKind.REGEX, "[0-9]{3}")
        d.add(key, PROMPT, RunMode.DECODE, source=p.source, grammar=grammar)
        run_until([d], lambda: not d.core.scheduler.open[key].waits_for_grammar)  # it is compiled before the load ends
        p.add(key, PROMPT, RunMode.PREFILL)
        run_until([d, p], lambda: d.ended(key) and p.ended(key) and p.clean())
        error = d.last(key).error
        assert error is not None and error.code == ErrorCode.GRAMMAR_PARSER_REJECTED_TOKEN
        assert d.tokens(key) == []
        assert d.clean()


def test_requests_beside_one_whose_grammar_is_being_compiled_then_overtake_it() -> None:
    with RealEngine(grammars=True, max_num_seqs=2) as d:
        workers = d.core.scheduler.grammars
        assert workers is not None
        submitted = []
        submit, workers.submit = workers.submit, lambda *job: submitted.append(job)  # type: ignore[method-assign]
        d.add("held", PROMPT, grammar=REGEX, ignore_eos=False)
        d.add("free", PROMPT)
        run_until([d], lambda: d.ended("free"))
        assert "held" in d.core.scheduler.open and "held" not in d.outputs
        assert not d.step()  # nothing spins meanwhile
        submit(*submitted[0])
        d.run()
        assert d.last("held").error is None

        workers.submit = lambda *job: None  # type: ignore[method-assign]
        d.add("aborted", PROMPT, grammar=REGEX)
        d.abort("aborted")
        d.run()
        assert d.last("aborted").error is not None and d.clean()


def test_a_grammar_when_the_engine_cannot_keep_to_it_then_the_request_is_refused() -> None:
    with RealEngine() as d:
        d.add("r", PROMPT, grammar=REGEX)
        d.run()
        error = d.last("r").error
        assert error is not None and error.code == ErrorCode.INVALID_PARAMS and "xgrammar" in error.message
        assert not d.ready.grammars
    with RealEngine(grammars=True) as d:
        assert d.ready.grammars
        d.add("r", PROMPT, grammar=GrammarSpec(GrammarKind.EBNF, 'root ::= "a" b'))
        d.run()
        error = d.last("r").error
        assert error is not None and error.code == ErrorCode.ERROR_GENERATE_CONFIG_FORMAT
        assert error.metadata["column"] == "14" and d.clean()


@pytest.mark.skipif(not jit.available("cpu"), reason="needs Triton in its interpreter (TRITON_INTERPRET=1)")
def test_the_device_path_when_rows_have_grammars_then_draws_the_tokens_of_the_host_path() -> None:
    tokens = []
    for backend in ("torch", "triton"):
        with RealEngine(grammars=True, attention_backend=backend, max_num_seqs=2) as d:
            d.add("a", PROMPT, grammar=REGEX, ignore_eos=False, max_tokens=3, temperature=0.8, seed=5, logprobs=1)
            d.add("b", PROMPT, max_tokens=3)
            run_until([d], lambda d=d: d.ended("a") and d.ended("b"), limit_s=100.0)
            tokens.append((d.tokens("a"), d.tokens("b")))
    assert tokens[0] == tokens[1]
