"""Faults that users of other servers reported, and the tests that try each of them here.

A row names its reports, as repository#number; what it needs that is not built stands in `missing`.
"""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """`tests`: file (below tests/) and the names of its functions."""

    reports: str
    tests: dict[str, str]
    missing: str = ""


TEXT, PARAMS = "server/test_server_text.py", "server/test_server_params.py"
PROMPTS, TOOLS = "server/test_server_prompts.py", "server/test_server_tools.py"
HTTP, SERVE = "server/test_server_http.py", "server/test_server_serve.py"
FIELDS, OWN = "server/test_server_fields.py", "server/test_server_cases.py"
REAL, CHAOS = "e2e/test_serve.py", "e2e/test_chaos.py"

CASES = {
    "a character split over tokens": Case(
        "ggml-org/llama.cpp#4446",
        {
            TEXT: "test_split_characters_are_whole_in_a_stream "
            "test_a_cut_character_is_flushed_at_the_end",
            "text/test_text_detokenizer.py": "test_split_characters_never_show_as_replacements "
            "test_invalid_bytes_do_not_delay_what_follows",
        },
    ),
    "a stop string over a token boundary": Case(
        "vllm-project/vllm#3672 huggingface/text-generation-inference#1724",
        {
            TEXT: "test_stop_strings",
            "text/test_text_stop.py": "test_any_cut_gives_the_whole_text_s_answer "
            "test_only_a_possible_beginning_is_held_back",
            "text/test_text_output.py": "test_held_back_text_is_flushed_at_the_end",
        },
    ),
    "reasoning in the content when stop is set": Case(
        "vllm-project/vllm#51641 vllm-project/vllm#45636",
        {OWN: "test_a_stop_that_never_comes_moves_no_text"},
    ),
    "empty, mangled or lossy token and bytes in logprobs": Case(
        "vllm-project/vllm#34875 vllm-project/vllm#19177 ollama/ollama#13497",
        {
            TEXT: "test_logprobs_of_chat test_logprobs_of_completions",
            "text/test_text_detokenizer.py": "test_logprob_entries_join_to_the_text",
        },
    ),
    "logprobs 0 and top_logprobs left out": Case(
        "vllm-project/tpu-inference#3572",
        {
            PARAMS: "test_logprobs_limits",
            TEXT: "test_logprobs_of_chat test_logprobs_of_completions",
        },
    ),
    "echo with max_tokens 0": Case(
        "vllm-project/vllm#6521 vllm-project/vllm#2995",
        {
            TEXT: "test_echo_without_new_tokens test_echo",
            "engine/test_scheduler.py": "test_max_tokens_zero_scores_the_prompt_only",
        },
    ),
    "when usage is sent in a stream": Case(
        "vllm-project/vllm#7262 vllm-project/vllm#36379 sgl-project/sglang#954",
        {TEXT: "test_usage_in_streams", PARAMS: "test_bad_values_name_their_field"},
    ),
    "a token id outside the vocabulary": Case(
        "vllm-project/vllm#16529 sgl-project/sglang#28088 vllm-project/vllm#9634",
        {
            PARAMS: "test_bad_values_name_their_field test_prompt_ids_outside_the_vocabulary",
            OWN: "test_ids_that_are_none_are_refused_wherever_they_are_sent",
            "structured/test_structured_tokens.py": (
                "test_bytes_fall_back_and_padding_is_never_allowed"
            ),
            "engine/test_engine_failures.py": "test_invalid_requests_change_nothing",
        },
    ),
    "NaN, Infinity and numbers out of range": Case(
        "sgl-project/sglang#28153 NVIDIA/TensorRT-LLM#17158",
        {
            PARAMS: "test_bad_values_name_their_field test_integral_floats_and_nulls_are_taken",
            "server/test_server_fuzz.py": "test_no_body_is_a_server_error",
            "server/test_server_fuzz_routes.py": (
                "test_no_damaged_body_of_any_route_is_a_server_error"
            ),
        },
    ),
    "n samples lost or mixed": Case(
        "vllm-project/vllm#16863 vllm-project/vllm#52398",
        {
            TEXT: "test_samples_are_kept_apart "
            "test_lists_of_prompts_are_numbered_by_prompt_then_sample",
            "server/test_server_streams.py": "test_leaving_clients_abort_all_their_samples "
            "test_one_failing_sample_ends_its_request",
            REAL: "test_samples_stop_and_seed",
        },
    ),
    "which tokens penalties count": Case(
        "NVIDIA/TensorRT-LLM#5623 vllm-project/vllm-metal#69 sgl-project/sglang#28179",
        {
            "engine/test_sampler_edges.py": "test_presence_and_frequency_do_not_see_the_prompt "
            "test_repetition_divides_positive_and_multiplies_negative",
            "engine/test_sampler_reference.py": "test_equals_the_reference",
            PARAMS: "test_bad_values_name_their_field",
        },
    ),
    "an empty prompt": Case(
        "vllm-project/vllm#7746 vllm-project/vllm#7283",
        {
            PARAMS: "test_empty_and_senseless_prompts test_missing_prompt_and_messages",
            PROMPTS: "test_thin_messages_are_served test_bad_messages_are_named",
            "engine/test_scheduler.py": "test_empty_prompts_and_ids_in_use_are_refused",
        },
    ),
    "the developer role dropped or refused": Case(
        "sgl-project/sglang#40082 vllm-project/vllm#42407",
        {
            PROMPTS: "test_developer_counts_as_system",
            "text/test_text_messages.py": "test_unknown_role_is_refused_by_name "
            "test_developer_merges_with_the_system_message_which_stays_first",
        },
    ),
    "special tokens typed by a user": Case(
        "huggingface/transformers#29279 vllm-project/vllm#31735 ggml-org/llama.cpp#26273",
        {
            PROMPTS: "test_typed_special_tokens_are_text_by_option",
            "text/test_text_plain_messages.py": "test_only_the_template_writes_special_tokens "
            "test_any_text test_names_cannot_be_typed",
        },
    ),
    "content as a list of parts": Case(
        "vllm-project/vllm#25001 0xPlaygrounds/rig#1362",
        {
            PROMPTS: "test_parts_equal_text_for_every_role test_bad_messages_are_named",
            "text/test_text_messages.py": "test_parts_are_joined_alike_for_every_role "
            "test_bad_content_names_the_part",
        },
    ),
    "content type and malformed JSON": Case(
        "vllm-project/vllm#11171 vllm-project/vllm#13193",
        {HTTP: "test_content_types test_bad_json test_routes_and_methods test_keys"},
    ),
    "the shape of the error of a prompt that is too long": Case(
        "vllm-project/vllm#12886 vllm-project/vllm#36197 anomalyco/opencode#25230",
        {
            PARAMS: "test_context_limits_are_exact_on_both_apis",
            OWN: "test_the_context_is_counted_alike_by_every_api",
            REAL: "test_refusals_have_openai_shape",
        },
    ),
    "a bad schema": Case(
        "sgl-project/sglang#4574 sgl-project/sglang#1776 vllm-project/vllm#17248 "
        "vllm-project/vllm#35438 huggingface/text-generation-inference#2280",
        {
            "server/test_server_structured.py": (
                "test_what_cannot_be_is_refused_before_anything_runs "
                "test_the_place_in_the_schema_is_named"
            ),
            "structured/test_structured_schema.py": "test_what_is_wrong_is_said_and_where "
            "test_bounds_of_size_and_depth",
            "server/test_server_forced_calls.py": "test_what_cannot_be_forced_is_said",
            REAL: "test_structured_output_is_valid_streamed_and_not",
        },
    ),
    "a schema that is accepted, and its output broken": Case(
        "guidance-ai/llguidance#265 vllm-project/vllm#30730",
        {
            "structured/test_structured_schema.py": "test_overlapping_patterns_and_properties "
            "test_white_space_is_bounded test_whatever_ends_is_valid",
            "structured/test_structured_engine.py": "test_a_cut_output_says_so",
        },
    ),
    "a forced call in a stream": Case(
        "vllm-project/vllm#24509 vllm-project/vllm#9693 InternLM/lmdeploy#3412",
        {
            "server/test_server_forced_calls.py": "test_forced_outputs_are_calls "
            "test_what_is_asked_of_the_engine",
            TOOLS: "test_streams_add_up_to_the_whole_answer test_one_call_if_no_more_are_wanted",
            "server/test_server_tool_requests.py": "test_choices_that_cannot_be_met",
        },
    ),
    "a cut call reported as complete": Case(
        "vllm-project/vllm#53269 vllm-project/vllm#58228 vllm-project/vllm#9053",
        {TOOLS: "test_a_cut_answer_says_so_wherever_it_is_cut"},
    ),
    "logprobs that vanish behind a parser": Case(
        "sgl-project/sglang#28601 sgl-project/sglang#26778 vllm-project/vllm#37738",
        {
            TOOLS: "test_streams_add_up_to_the_whole_answer test_entries_wait_for_held_back_text",
            OWN: "test_a_stop_that_never_comes_moves_no_text",
        },
    ),
    "cache namespaces that collide": Case(
        "vllm-project/vllm#44701 vllm-project/vllm#30931 sgl-project/sglang#24638 "
        "openvinotoolkit/openvino.genai#3722",
        {
            "kv/test_kv_prefix.py": "test_namespaces_of_equal_text_differ "
            "test_salts_leave_nothing_behind",
            REAL: "test_salts_share_no_cache",
        },
        missing="adapters are no more than a part of the key, and weights are never read again",
    ),
    "a client that leaves, and a server that goes on": Case(
        "vllm-project/vllm#54947 ROCm/ATOM#1562",
        {
            SERVE: "test_disconnects_reach_the_engine",
            "server/test_server_streams.py": "test_leaving_clients_abort_all_their_samples",
            REAL: "test_a_hundred_disconnecting_clients_leave_nothing",
            "e2e/test_soak.py": "test_ninety_seconds_of_everything_leave_nothing",
        },
    ),
    "incomplete or cut weight files": Case(
        "vllm-project/vllm#34859 vllm-project/vllm#38336 osaurus-ai/vmlx-swift#217",
        {
            "loader/test_loader_safetensors.py": "test_a_cut_file_is_named_with_its_tensor "
            "test_damaged_files test_damaged_headers test_an_absent_shard_is_named "
            "test_a_tensor_in_two_shards test_index_paths_stay_inside",
            "loader/test_loader_load.py": "test_missing_surplus_and_misshapen_tensors_are_named",
            "text/test_text_gguf.py": "test_every_truncation_is_refused",
        },
    ),
    "rope variants ignored or misread": Case(
        "sgl-project/sglang#2943 huggingface/text-generation-inference#816 "
        "vllm-project/vllm#2518 vllm-project/vllm#10293",
        {
            "models/test_models_parity.py": "test_rope test_rope_of_other_families "
            "test_dynamic_beyond_the_original_length",
            "models/test_models_config.py": "test_unknown_rope_types_are_named "
            "test_no_scaling_is_the_default_rope test_context_length test_partial_rotary_factor "
            "test_dynamic_leaves_short_contexts_alone",
        },
    ),
    "a shutdown with open streams": Case(
        "pgjones/hypercorn#308 pgjones/hypercorn#374 vllm-project/vllm#36666",
        {
            SERVE: "test_drain_lets_streams_end test_the_end_waits_for_no_connection "
            "test_streams_end_with_an_event_at_the_deadline_or_a_second_signal "
            "test_http2_by_prior_knowledge",
            "server/test_server_connections.py": (
                "test_a_client_that_reads_nothing_does_not_hold_the_end"
            ),
            CHAOS: "test_a_server_ends_in_time_though_its_engine_is_held",
        },
    ),
    "a start that looks like a failure": Case(
        "lightseekorg/tokenspeed#365 vllm-project/vllm#28051 vllm-project/vllm#50985 "
        "vllm-project/vllm#2418",
        {
            SERVE: "test_loading_ready_and_a_clean_end test_failures_while_loading",
            CHAOS: "test_a_taken_port_is_found_before_anything_starts "
            "test_a_held_engine_that_loads_is_waited_for "
            "test_a_start_that_takes_too_long_ends_a_held_engine_too",
            "engine/test_engine_build.py": "test_a_pool_that_cannot_do_says_what_would",
            "engine/test_process_life.py": "test_a_start_that_fails_says_why_in_one_line",
            "text/test_text_source.py": "test_names_that_mean_nothing",
            "cli/test_cli_settings.py": "test_refusals",
        },
    ),
    "allowed_token_ids with bad_words": Case(
        "vllm-project/vllm#57986",
        {
            FIELDS: "test_bans_that_cannot_hold",
            "engine/test_sampler_reference.py": "test_equals_the_reference",
        },
    ),
    "special tokens skipped before the parser": Case(
        "vllm-project/vllm#25281 vllm-project/vllm#2538",
        {TOOLS: "test_special_tokens_are_shown_to_the_parser_alone"},
    ),
    "generated text that is cut into other tokens in the next turn": Case(
        "mlc-ai/mlc-llm#3179",
        {
            REAL: "test_a_next_turn_by_text_or_by_ids",
            PROMPTS: "test_ids_and_text_prompts_mean_the_same",
        },
    ),
    "chunks that carry the whole answer so far": Case(
        "NVIDIA/TensorRT-LLM#3280", {OWN: "test_every_chunk_is_new_text_and_none_all_of_it"}
    ),
    "many streams at once, live clients called gone": Case(
        "sgl-project/sglang#17031",
        {"e2e/test_thousand_streams.py": "test_a_thousand_streams"},
    ),
}


@functools.cache
def functions_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in tree.body if isinstance(node, kinds)}


@pytest.mark.parametrize("name", CASES)
def test_a_case_is_tried(name: str) -> None:
    case = CASES[name]
    assert case.tests or case.missing
    for file, names in case.tests.items():
        named = names.split()
        assert named and all(each.startswith("test_") for each in named)
        assert set(named) <= functions_in(file), file


def test_no_report_is_named_twice() -> None:
    reports = [report for case in CASES.values() for report in case.reports.split()]
    assert len(reports) == len(set(reports)) and len(CASES) == 33
    assert all(report.count("/") == report.count("#") == 1 for report in reports)
