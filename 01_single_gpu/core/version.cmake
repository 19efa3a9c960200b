# Run at every build: writes OUTPUT, which defines build_commit() (version.h), if the commit has changed.
#   cmake -D SOURCE=... -D OUTPUT=... -P version.cmake
set(commit unknown)
find_program(GIT git)
if(GIT)
    set(git ${GIT} --no-optional-locks -c safe.directory=${SOURCE} -C ${SOURCE})
    # Without a repository of its own, the one that contains the folder is another project's.
    execute_process(COMMAND ${git} rev-parse --show-toplevel OUTPUT_VARIABLE root RESULT_VARIABLE failed
                    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    get_filename_component(source "${SOURCE}" REALPATH)
    if(NOT failed AND root STREQUAL source)
        execute_process(COMMAND ${git} describe --always --dirty --abbrev=12 OUTPUT_VARIABLE described
                        RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
        if(NOT failed AND described MATCHES "^[A-Za-z0-9._/+-]+$")
            set(commit ${described})
        endif()
    endif()
endif()
set(text "#include \"01_single_gpu/core/version.h\"\n
namespace train70b {\nconst char* build_commit() { return \"${commit}\"; }\n}  // namespace train70b\n")
set(before "")
if(EXISTS ${OUTPUT})
    file(READ ${OUTPUT} before)
endif()
if(NOT before STREQUAL text)
    file(WRITE ${OUTPUT} "${text}")
endif()
