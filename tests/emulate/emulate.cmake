# The .cu files as C++ on an emulated GPU (README.md).
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" OR NOT CMAKE_SYSTEM_NAME STREQUAL "Linux"
        OR NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    message(FATAL_ERROR "-DTRAIN70B_CUDA=EMULATE: needs Linux on x86-64 (tests/emulate/block.cpp switches stacks) and GCC")
endif()
find_package(Python3 REQUIRED COMPONENTS Interpreter)
find_path(TRAIN70B_CUDA_HEADERS cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS} /usr/local/cuda/include)
find_path(TRAIN70B_NCCL_HEADERS nccl.h HINTS ${TRAIN70B_CUDA_HEADERS})
if(NOT TRAIN70B_CUDA_HEADERS OR NOT TRAIN70B_NCCL_HEADERS)
    message(FATAL_ERROR "The emulated GPU needs the headers of CUDA 13 and of NCCL (where there is no toolkit: "
        "tests/emulate/README.md), found with -DTRAIN70B_CUDA_HEADERS=DIR -DTRAIN70B_NCCL_HEADERS=DIR")
endif()
if(TRAIN70B_EMULATE)
    set(CUDAToolkit_INCLUDE_DIRS ${TRAIN70B_CUDA_HEADERS})
endif()

set(emulate ${CMAKE_SOURCE_DIR}/tests/emulate)
add_library(emulated_cuda STATIC ${emulate}/access.cpp ${emulate}/block.cpp ${emulate}/counts.cpp ${emulate}/cublas.cpp
    ${emulate}/cublaslt.cpp ${emulate}/products.cpp ${emulate}/memory.cpp ${emulate}/nccl.cpp ${emulate}/runtime.cpp
    ${emulate}/devices.cpp ${emulate}/device_functions.cpp)
target_compile_options(emulated_cuda PRIVATE -O2 -Wall -Wextra -Werror -march=x86-64-v3)
if(TRAIN70B_SANITIZE)
    target_compile_options(emulated_cuda PRIVATE -fsanitize=${TRAIN70B_SANITIZE} -fno-omit-frame-pointer -g1)
endif()
target_include_directories(emulated_cuda BEFORE PUBLIC ${emulate}/include)
target_include_directories(emulated_cuda SYSTEM PUBLIC ${TRAIN70B_CUDA_HEADERS} ${TRAIN70B_NCCL_HEADERS})
target_include_directories(emulated_cuda PRIVATE ${CBLAS_INCLUDE_DIR})
target_link_libraries(emulated_cuda PUBLIC ${OPENBLAS_LIBRARY})

# Of the thread sanitizer only the calls before each access, which access.cpp defines; the address sanitizer excludes
# them.
set(TRAIN70B_CHECKED_ACCESSES -fsanitize=thread)
if(TRAIN70B_SANITIZE)
    set(TRAIN70B_CHECKED_ACCESSES)
endif()

# C++ of one .cu or .cuh file.
function(translate name made)
    get_filename_component(made_folder ${made} DIRECTORY)
    file(MAKE_DIRECTORY ${made_folder})
    add_custom_command(OUTPUT ${made} DEPENDS ${name} ${emulate}/transform.py
        COMMAND ${Python3_EXECUTABLE} ${emulate}/transform.py ${name} ${CMAKE_SOURCE_DIR}/${name} ${made})
endfunction()
set(TRAIN70B_TRANSLATED_OPTIONS -O2 -Wconversion -Wno-sign-conversion -g1 -gdwarf-4 -fno-strict-aliasing -Wno-unknown-pragmas
    -ffile-prefix-map=${CMAKE_BINARY_DIR}=. ${TRAIN70B_CHECKED_ACCESSES})

if(NOT TRAIN70B_SANITIZE)
    add_executable(emulated_mistakes ${CMAKE_BINARY_DIR}/emulated/mistakes.cu.cpp)  # for test_emulator.py
    translate(tests/emulate/mistakes.cu ${CMAKE_BINARY_DIR}/emulated/mistakes.cu.cpp)
    target_compile_options(emulated_mistakes PRIVATE ${TRAIN70B_TRANSLATED_OPTIONS})
    target_link_libraries(emulated_mistakes PRIVATE emulated_cuda)
endif()

# emulated_<folder>, as gpu_<folder>: objects of the C++ made of the .cu files up to this chapter, with the emulated
# GPU. A chapter's .cuh files are made beside them, where they are found before the original ones. Sets gpu_<folder> to
# it where programs run on the emulated GPU.
set(TRAIN70B_EMULATED_HEADERS)
function(add_emulated_chapter folder below)
    file(GLOB_RECURSE found CONFIGURE_DEPENDS RELATIVE ${CMAKE_SOURCE_DIR} ${folder}/*.cu ${folder}/*.cuh)
    set(sources)
    foreach(name ${found})
        if(name MATCHES "\\.cuh$")
            set(made ${CMAKE_BINARY_DIR}/emulated/${name})
            list(APPEND TRAIN70B_EMULATED_HEADERS ${made})
        else()
            set(made ${CMAKE_BINARY_DIR}/emulated/${name}.cpp)
            list(APPEND sources ${made})
            get_filename_component(file ${name} NAME)
            if(file IN_LIST TRAIN70B_LONG_CUDA)
                set_source_files_properties(${made} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
            endif()
        endif()
        translate(${name} ${made})
    endforeach()
    set(TRAIN70B_EMULATED_HEADERS ${TRAIN70B_EMULATED_HEADERS} PARENT_SCOPE)
    add_library(emulated_${folder} INTERFACE)
    target_link_libraries(emulated_${folder} INTERFACE $<IF:$<STREQUAL:${below},>,emulated_cuda,emulated_${below}>)
    if(sources)
        add_library(emulated_objects_${folder} OBJECT ${sources} ${TRAIN70B_EMULATED_HEADERS})
        target_include_directories(emulated_objects_${folder} BEFORE PRIVATE
            ${CMAKE_BINARY_DIR}/emulated ${emulate}/include)
        target_include_directories(emulated_objects_${folder} SYSTEM PRIVATE ${TRAIN70B_CUDA_HEADERS}
            ${TRAIN70B_NCCL_HEADERS})
        target_link_libraries(emulated_objects_${folder} PRIVATE lib_${folder})
        target_compile_options(emulated_objects_${folder} PRIVATE ${TRAIN70B_TRANSLATED_OPTIONS})
        compile_together(emulated_objects_${folder})
        target_sources(emulated_${folder} INTERFACE $<TARGET_OBJECTS:emulated_objects_${folder}>)
    endif()
    if(TRAIN70B_EMULATE)
        target_link_libraries(gpu_${folder} INTERFACE emulated_${folder})
    endif()
endfunction()
