/* All verbs, each defined in the file of its name (verb_template_ls in verb_template.c). */
#ifndef SPACE_CLI_VERBS_H
#define SPACE_CLI_VERBS_H

#include "cli/verb.h"

extern const struct verb verb_attach, verb_branch, verb_complete, verb_cp, verb_create, verb_doctor, verb_events,
    verb_exec, verb_help, verb_history, verb_info, verb_key_create, verb_key_ls, verb_key_rm, verb_kill, verb_ls,
    verb_pause, verb_port, verb_ps, verb_resume, verb_rewind, verb_rm, verb_run, verb_serve, verb_shell, verb_snapshot,
    verb_snapshot_ls, verb_snapshot_rm, verb_suspend, verb_template_build, verb_template_inspect, verb_template_ls,
    verb_template_rm, verb_top, verb_update, verb_version, verb_wake;

#endif
