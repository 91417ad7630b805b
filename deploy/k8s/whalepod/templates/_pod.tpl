{{/* Where the store is, with its password: not in the ConfigMap. */}}
{{- define "whalepod.storeEnv" -}}
{{- if .Values.redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "whalepod.redisSecretName" . }}
      key: {{ .Values.redis.auth.key }}
{{- $urls := list }}
{{- range $index := until (int .Values.redis.shards) }}
{{- $host := include "whalepod.redisHost" (dict "root" $ "index" $index) }}
{{- $urls = append $urls (printf "redis://:$(REDIS_PASSWORD)@%s:%d/0" $host (int $.Values.redis.port)) }}
{{- end }}
- name: WHALEPOD_REDIS_URL
  value: {{ first $urls | quote }}
{{- if gt (len $urls) 1 }}
- name: WHALEPOD_KV_URLS
  value: {{ join "," $urls | quote }}
{{- end }}
{{- else if .Values.redis.external.existingSecret }}
- name: WHALEPOD_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.external.existingSecret }}
      key: {{ .Values.redis.external.urlKey }}
{{- with .Values.redis.external.kvUrlsKey }}
- name: WHALEPOD_KV_URLS
  valueFrom:
    secretKeyRef:
      name: {{ $.Values.redis.external.existingSecret }}
      key: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* (dict "root" $ "role" "decode" "values" .Values.decode): environment of one of our processes. */}}
{{- define "whalepod.env" -}}
{{- include "whalepod.storeEnv" .root }}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: HOME
  value: /tmp
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* What Ray reads as it starts in a pod: ranks have the priority of other processes, hear SIGTERM, and outlive the head. */}}
{{- define "whalepod.rayEnv" -}}
- name: RAY_worker_niceness
  value: "0"
- name: RAY_DISABLE_FAILURE_SIGNAL_HANDLER
  value: "1"
- name: RAY_gcs_rpc_server_reconnect_timeout_s
  value: "2147483"
{{- end -}}

{{- define "whalepod.volumeMounts" -}}
- name: config
  mountPath: /etc/whalepod/cluster.yaml
  subPath: cluster.yaml
  readOnly: true
- name: cluster-secret
  mountPath: /etc/whalepod/secret
  readOnly: true
- name: tmp
  mountPath: /tmp
{{- if .root.Values.model.volume }}
- name: model
  mountPath: {{ .root.Values.model.mountPath }}
  readOnly: true
{{- end }}
{{- if .values.sharedMemory }}
- name: shared-memory
  mountPath: /dev/shm
{{- end }}
{{- if eq .role "router" }}
{{- if .values.apiKeys.existingSecret }}
- name: api-keys
  mountPath: /etc/whalepod/api-keys
  readOnly: true
{{- end }}
{{- if .values.tls.existingSecret }}
- name: tls
  mountPath: /etc/whalepod/tls
  readOnly: true
{{- end }}
{{- end }}
{{- if .root.Values.peerTls.existingSecret }}
- name: peer-tls
  mountPath: /etc/whalepod/peer-tls
  readOnly: true
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "whalepod.volumes" -}}
- name: config
  configMap:
    name: {{ include "whalepod.configName" .root }}
- name: cluster-secret
  secret:
    secretName: {{ include "whalepod.secretName" .root }}
    defaultMode: 0440
    items:
      - key: {{ .root.Values.clusterSecret.key }}
        path: {{ .root.Values.clusterSecret.key }}
- name: tmp
  emptyDir: {}
{{- with .root.Values.model.volume }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.sharedMemory }}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ . }}
{{- end }}
{{- if eq .role "router" }}
{{- with .values.apiKeys.existingSecret }}
- name: api-keys
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .values.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end }}
{{- with .root.Values.peerTls.existingSecret }}
- name: peer-tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Resources of one rank, its GPUs included. */}}
{{- define "whalepod.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- if .gpus -}}
{{- $resources = mustMergeOverwrite $resources (dict "limits" (dict "nvidia.com/gpu" (int .gpus))) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* (dict "root" $ "values" … "role" …): where its pods may and should run. */}}
{{- define "whalepod.scheduling" -}}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml .values.topologySpreadConstraints | nindent 2 }}
{{- else if eq .role "router" }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "whalepod.selectorLabels" . | nindent 8 }}
{{- end }}
{{- end -}}

{{/* Metadata of a pod template: a changed configuration or chart secret starts pods anew. */}}
{{- define "whalepod.podMetadata" -}}
labels:
  {{- include "whalepod.labels" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include "whalepod.config" .root | sha256sum }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* What every pod specification of ours begins with. Without enableServiceLinks: false, Kubernetes would set variables
     like WHALEPOD_DECODE_PORT=tcp://…, which are settings of ours. */}}
{{- define "whalepod.podBase" -}}
serviceAccountName: {{ include "whalepod.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- include "whalepod.scheduling" . }}
{{- end -}}

{{- define "whalepod.containerBase" -}}
image: {{ include "whalepod.image" (dict "image" .root.Values.image "default" .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
{{- end -}}

{{/* Kernels that the image for GPUs has compiled, copied to where a rank may write: all ranks need not compile the same. */}}
{{- define "whalepod.kernels" -}}
{{- if eq (dig "engine" "device" "cpu" .root.Values.settings) "cuda" -}}
initContainers:
  - name: kernels
    {{- include "whalepod.containerBase" . | nindent 4 }}
    command: [cp, -r, /opt/whalepod/triton, /tmp/]
    resources:
      requests: {cpu: 100m, memory: 64Mi}
      limits: {memory: 256Mi}
    volumeMounts:
      - name: tmp
        mountPath: /tmp
{{- end -}}
{{- end -}}

{{/* gRPC health on `port`; a process that is loading does not answer yet, one that drains says NOT_SERVING. Probes have
no certificate to show: with peerTls `other` is asked, which is there once the process is ready. */}}
{{- define "whalepod.grpcProbes" -}}
{{- $probe := dict "grpc" (dict "port" (int .port)) -}}
{{- if .root.Values.peerTls.existingSecret -}}
{{- $probe = .other -}}
{{- end -}}
startupProbe:
  {{- toYaml $probe | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ max 1 (div (int .startupSeconds) 5) }}
readinessProbe:
  {{- toYaml $probe | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  {{- toYaml $probe | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{/* Name of the operators' port of process `index` (from 0) of a router. */}}
{{- define "whalepod.adminPort" -}}
{{- if . }}admin-{{ . }}{{ else }}admin{{ end -}}
{{- end -}}
