#include "cli/verbs.h"

#include "cli/verb.h"

/* In the order in which help lists them. */
const struct verb *const verb_table[] = {
    &verb_run,         &verb_create,
    &verb_ls,          &verb_info,
    &verb_update,      &verb_rm,
    &verb_pause,       &verb_resume,
    &verb_suspend,     &verb_wake,
    &verb_exec,        &verb_shell,
    &verb_attach,      &verb_ps,
    &verb_kill,        &verb_cp,
    &verb_port,        &verb_snapshot,
    &verb_snapshot_ls, &verb_snapshot_rm,
    &verb_history,     &verb_branch,
    &verb_rewind,      &verb_template_build,
    &verb_template_ls, &verb_template_inspect,
    &verb_template_rm, &verb_key_create,
    &verb_key_ls,      &verb_key_rm,
    &verb_doctor,      &verb_serve,
    &verb_top,         &verb_events,
    &verb_version,     &verb_help,
    &verb_complete,    NULL,
};
