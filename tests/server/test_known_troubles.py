"""What users and attackers of such servers are known to have found, and the tests that stand for
it: all of it, so that none is lost when tests move."""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

USERS = {
    "a bad request kills the engine or changes its neighbours": (
        "server/test_what_users_suffer_from.py"
        " test_a_bad_request_neither_kills_the_engine_nor_changes_its_neighbours",
        "server/test_what_users_suffer_from.py test_echo_with_no_tokens",
        "server/test_chat_api.py test_the_same_request_id_at_once",
        "server/test_engine_client.py test_a_duplicate_id",
    ),
    "invalid, empty or rejected grammars, and a bad one after good ones": (
        "server/test_real_model.py test_grammars_bad_after_good",
        "server/test_structured_output.py test_the_empty_schema_is_any_json",
        "server/test_structured_output.py test_a_rejected_token_is_the_end_of_that_one",
        "server/test_structured_output.py test_what_cannot_be",
    ),
    "the client goes, and its blocks do not come back": (
        "server/test_what_users_suffer_from.py test_when_the_client_goes_its_blocks_come_back",
        "server/test_what_users_suffer_from.py"
        " test_when_the_client_goes_in_the_middle_of_its_prompt_its_blocks_come_back",
        "server/test_what_users_suffer_from.py"
        " test_when_the_client_goes_during_tokenization_nothing_is_started",
        "server/test_load.py test_many_streams_and_a_third_of_them_leave",
    ),
    "half characters, emoji and stop strings across tokens": (
        "server/test_what_users_suffer_from.py test_emoji_across_tokens_and_no_half_characters",
        "server/test_what_users_suffer_from.py test_a_text_that_ends_in_half_a_character",
        "server/test_what_users_suffer_from.py"
        " test_a_prompt_that_ends_in_half_a_character_is_continued",
        "server/test_what_users_suffer_from.py"
        " test_a_partial_stop_string_is_neither_leaked_nor_lost",
        "server/test_streams_and_wholes.py test_any_text_and_any_stop_strings",
    ),
    "the prefix cache changes the answer": (
        "server/test_what_users_suffer_from.py test_a_cache_hit_does_not_change_the_answer",
        "server/test_real_model.py test_a_hit_in_the_prefix_cache_is_told_and_changes_nothing",
        "e2e/test_sharing_options.py test_log_probabilities_of_a_hit_are_those_of_a_miss",
    ),
    "memory or blocks leak over thousands of requests": (
        "server/test_memory.py test_five_thousand_requests",
        "server/test_memory.py test_the_engines_process",
        "server/test_engine_process.py test_5000_requests_leave_no_memory_behind",
        "server/test_what_users_suffer_from.py test_a_hundred_requests_leave_nothing_behind",
    ),
    "starvation and preemption without end": (
        "engine/test_swap.py test_no_thrash_and_no_starvation",
        "engine/test_scheduler.py test_a_big_request_is_not_starved_by_small_ones",
    ),
    "out of memory without numbers": (
        "server/test_serve_command.py test_what_is_wrong_is_told_in_a_sentence",
        "unit/test_memory_plan.py test_whatever_is_proposed_does_fit",
        "server/test_what_users_suffer_from.py test_a_request_that_can_never_fit_gets_numbers",
    ),
    "orphans after a kill, ports in use, starts that hang without a cause": (
        "server/test_serve_command.py test_kill_9_of_the_engine_and_of_both_leaves_nothing_behind",
        "server/test_serve_command.py test_ctrl_c_ends_it_and_its_engine",
        "server/test_serve_command.py test_what_is_wrong_is_told_in_a_sentence",
        "server/test_engine_process.py test_after_the_server_was_killed",
        "server/test_engine_process.py test_a_start_that_hangs_is_named",
    ),
    "seeds that are ignored": (
        "server/test_real_model.py test_seeds",
        "e2e/test_same_tokens.py test_seeded_in_a_batch_of_16",
    ),
    "log-probabilities of minus infinity break JSON": (
        "server/test_completions_api.py test_infinities_never_reach_json",
    ),
    "a huge prompt blocks /health": (
        "server/test_what_users_suffer_from.py test_health_answers_at_once_during_a_huge_prompt",
        "server/test_what_users_suffer_from.py"
        " test_a_prompt_of_a_megabyte_is_refused_without_tokenizing_it",
        "server/test_engine_process_offload.py test_while_a_megabyte_is_tokenized",
        "server/test_engine_process_offload.py test_while_a_grammar_is_compiled",
    ),
    "health says yes while dead, or no while busy": (
        "server/test_what_users_suffer_from.py test_health_tells_the_truth",
        "server/test_engine_client.py test_health_tells_the_truth",
    ),
    "streamed tool calls lose arguments": (
        "server/test_tool_parsers.py test_no_argument_is_lost",
        "server/test_streams_and_wholes.py test_tool_calls_streamed_and_whole",
        "server/test_control_tokens.py test_streamed_and_whole",
        "server/test_real_model.py test_calls_that_are_cut_off_leave_no_text",
    ),
    "the usage chunk and its empty choices": (
        "server/test_chat_api.py test_usage_in_a_stream",
        "server/test_openai_specification.py test_answers_that_hold_all_there_is",
    ),
    "defaults of the model's file override silently": (
        "server/test_what_users_suffer_from.py"
        " test_defaults_of_the_checkpoint_are_shown_and_requests_win",
    ),
}

ATTACKERS = {
    "pickle over sockets": (
        "server/test_security.py test_no_pickle_no_eval_no_shell",
        "unit/test_no_pickle.py",
    ),
    "sockets on all interfaces": (
        "server/test_security.py test_loopback_and_no_cors_unless_told_otherwise",
        "server/test_engine_process.py test_nothing_on_disk_and_nobody_else_can_connect",
    ),
    "a way around the key by path or Host header": (
        "server/test_security.py test_no_path_gets_around_the_api_key",
        "server/test_security.py test_targets_that_are_no_paths_are_refused",
        "server/test_security.py test_hostile_host_headers",
        "server/test_security.py test_two_host_headers",
    ),
    "keys guessed by time": ("server/test_security.py test_keys_are_compared_in_constant_time",),
    "huge n, logprobs, bodies and headers": (
        "server/test_security.py test_huge_numbers_are_refused_before_any_work",
        "server/test_security.py test_bodies_that_are_too_large",
        "server/test_security.py test_headers_that_are_too_large",
    ),
    "schemas and patterns that cost without end": (
        "server/test_security.py test_schemas_that_are_too_large_or_deep",
        "server/test_structured_output.py test_limits_of_size_and_depth",
        "server/test_structured_output.py test_it_harms_nobody",
    ),
    "templates and their arguments": (
        "server/test_security.py test_no_template_comes_from_a_request",
        "server/test_security.py test_messages_are_not_templates",
        "server/test_security.py test_a_template_that_never_ends_is_ended",
    ),
    "embeddings read by torch.load": ("server/test_security.py test_torch_load_is_not_offered",),
    "code that comes with a model": ("e2e/test_hf_loading.py test_planted_code_never_runs",),
    "image URLs that are fetched": (
        "server/test_security.py test_remote_urls_are_refused_and_nothing_is_fetched",
    ),
    "files with hostile counts and offsets": ("unit/test_gguf_hostile.py test_random_damage",),
    "the prefix cache tells others what was asked": (
        "server/test_security.py test_a_cache_salt_keeps_others_from_learning",
    ),
    "errors that show paths and addresses": (
        "server/test_security.py test_errors_show_no_paths_and_no_addresses",
        "server/test_security.py test_a_defect_shows_the_client_nothing",
    ),
}


@cache
def names(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


@pytest.mark.parametrize("trouble", [*USERS, *ATTACKERS])
def test_it_has_its_tests(trouble):
    for place in {**USERS, **ATTACKERS}[trouble]:
        file, _, name = place.partition(" ")
        found = names(file)
        assert name in found if name else any(each.startswith("test_") for each in found), place
