/* Removal of whole trees. Links are removed, never followed; the tree may be deeper than PATH_MAX. */
#ifndef SPACE_GUEST_REMOVE_H
#define SPACE_GUEST_REMOVE_H

#include "base/error.h"

#define REMOVE_DEPTH_MAX 65536
/* How often a directory is read again because something new keeps appearing in it. */
#define REMOVE_PASSES_MAX 64

/* Removes `name`, a single component, in the directory `at`. Nothing there is success. `shown` is the path for
 * messages. */
int remove_tree(int at, const char *name, const char *shown, struct error *e);

#endif
