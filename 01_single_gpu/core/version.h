#pragma once
// Which code this is: the commit from which the program was built.

namespace train70b {

// `git describe --always --dirty` when the program was built, as "2ab6f0612345-dirty"; "unknown" outside a git
// repository of its own. In the metrics file, --version and every file from which a run can be continued.
const char* build_commit();

}  // namespace train70b
