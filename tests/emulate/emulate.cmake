# -DTRAIN70B_CUDA=EMULATE: the .cu files as C++ on an emulated GPU (README.md).
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" OR NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
    message(FATAL_ERROR "-DTRAIN70B_CUDA=EMULATE: needs Linux on x86-64 (tests/emulate/block.cpp switches stacks)")
endif()
find_package(Python3 REQUIRED COMPONENTS Interpreter)
find_path(TRAIN70B_CUDA_HEADERS cublasLt.h HINTS /usr/local/cuda/include $ENV{CUDA_HOME}/include)
find_path(TRAIN70B_NCCL_HEADERS nccl.h HINTS ${TRAIN70B_CUDA_HEADERS})
if(NOT TRAIN70B_CUDA_HEADERS OR NOT TRAIN70B_NCCL_HEADERS)
    message(FATAL_ERROR "-DTRAIN70B_CUDA=EMULATE: needs the headers of CUDA 12.8 or later and of NCCL (where there is no toolkit: "
        "tests/emulate/README.md), found with -DTRAIN70B_CUDA_HEADERS=DIR -DTRAIN70B_NCCL_HEADERS=DIR")
endif()
set(CUDAToolkit_INCLUDE_DIRS ${TRAIN70B_CUDA_HEADERS})

set(emulate ${CMAKE_SOURCE_DIR}/tests/emulate)
add_library(emulated_cuda STATIC ${emulate}/access.cpp ${emulate}/block.cpp ${emulate}/cublaslt.cpp ${emulate}/memory.cpp
    ${emulate}/nccl.cpp ${emulate}/runtime.cpp)
target_compile_options(emulated_cuda PRIVATE -O2 -Wall -Wextra -Werror -march=x86-64-v3)
if(TRAIN70B_SANITIZE)
    target_compile_options(emulated_cuda PRIVATE -fsanitize=${TRAIN70B_SANITIZE} -fno-omit-frame-pointer -g1)
endif()
target_include_directories(emulated_cuda BEFORE PUBLIC ${emulate}/include)
target_include_directories(emulated_cuda SYSTEM PUBLIC ${TRAIN70B_CUDA_HEADERS} ${TRAIN70B_NCCL_HEADERS})
target_include_directories(emulated_cuda PRIVATE ${CBLAS_INCLUDE_DIR})
target_compile_definitions(emulated_cuda INTERFACE TRAIN70B_EMULATED)
target_link_libraries(emulated_cuda PUBLIC ${OPENBLAS_LIBRARY} ${CMAKE_DL_LIBS})
target_link_libraries(train70b_settings INTERFACE $<LINK_ONLY:emulated_cuda>)

# Sets `result` to the C++ files made of a chapter's .cu files. Its .cuh files are made beside them, where they are found
# before the original ones.
set(TRAIN70B_EMULATED_HEADERS)
function(emulated_sources result folder)
    file(GLOB found CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR} ${folder}/*.cuh ${folder}/*/*.cuh ${folder}/*.cu
        ${folder}/*/*.cu)
    set(sources)
    foreach(name ${found})  # .cuh sorts after .cu: headers first
        if(name MATCHES "\\.cuh$")
            set(made ${CMAKE_BINARY_DIR}/emulated/${name})
            list(APPEND TRAIN70B_EMULATED_HEADERS ${made})
        else()
            set(made ${CMAKE_BINARY_DIR}/emulated/${name}.cpp)
            list(APPEND sources ${made})
        endif()
        get_filename_component(made_folder ${made} DIRECTORY)
        file(MAKE_DIRECTORY ${made_folder})
        add_custom_command(OUTPUT ${made} DEPENDS ${name} ${emulate}/transform.py
            COMMAND ${Python3_EXECUTABLE} ${emulate}/transform.py ${name} ${CMAKE_SOURCE_DIR}/${name} ${made})
    endforeach()
    # -fsanitize=thread only for its calls before each access, which access.cpp defines; the address sanitizer excludes it.
    set_source_files_properties(${sources} PROPERTIES
        SKIP_PRECOMPILE_HEADERS ON
        OBJECT_DEPENDS "${TRAIN70B_EMULATED_HEADERS}"
        INCLUDE_DIRECTORIES "${CMAKE_BINARY_DIR}/emulated;${emulate}/include;${TRAIN70B_CUDA_HEADERS};${TRAIN70B_NCCL_HEADERS}"
        COMPILE_OPTIONS "-O2;-g1;-w;-ffile-prefix-map=${CMAKE_BINARY_DIR}=.;$<$<NOT:$<BOOL:${TRAIN70B_SANITIZE}>>:-fsanitize=thread>")
    set(TRAIN70B_EMULATED_HEADERS ${TRAIN70B_EMULATED_HEADERS} PARENT_SCOPE)
    set(${result} ${sources} PARENT_SCOPE)
endfunction()
